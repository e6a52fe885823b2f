"""What a person types: options that commands share, settings, completion of names."""
