"""Keys and certificates that admit the sites of a federation."""

from halfmoon.sites.keys.key_folder import Access

__all__ = ["Access"]
