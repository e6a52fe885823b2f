"""Models: the zoo, named blocks, loading."""
