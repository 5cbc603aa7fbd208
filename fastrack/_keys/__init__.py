"""Keys of owners, where they are found, and for whom they are wrapped."""
