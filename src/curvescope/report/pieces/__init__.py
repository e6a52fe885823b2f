"""What a section of the page is made of: cards, findings, methods, pictures, tables."""
