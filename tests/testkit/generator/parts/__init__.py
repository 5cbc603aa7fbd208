"""Make what the cases are made of: messages, files, keys and documents."""
