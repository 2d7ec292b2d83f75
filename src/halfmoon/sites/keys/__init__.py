"""Who may come into a federation: one folder with an authority, the server's certificate and the sites' keys."""

from halfmoon.sites.keys.key_folder import Access

__all__ = ["Access"]
