"""Commands that serve sealed folders by programs of others."""
