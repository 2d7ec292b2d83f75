"""Pages that are served only to this machine: label a folder, review predictions, watch runs."""
