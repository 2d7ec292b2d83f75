"""Folders of images and labels of a site, keys, and the use of trained models."""
