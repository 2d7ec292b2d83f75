"""What a site has of its own: folders of images and labels, keys, and trained models at work."""
