"""A site in a federation: consent, local updates, and the memory that it retains between rounds."""
