"""Pages for people, served on this machine alone: label a folder, review predictions, watch runs."""
