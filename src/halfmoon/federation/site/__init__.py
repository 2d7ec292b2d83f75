"""A site in a federation: consent, its client updates and what it remembers between rounds."""
