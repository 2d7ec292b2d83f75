"""Paths of the files in a folder of keys, relative to the folder."""

RECORD_FILE = "access.json"
LOCK_FILE = ".lock"

CA = "ca.crt"
CA_KEY = "ca/ca.key"
CERTIFICATE = "server/server.crt"
KEY = "server/server.key"

SITE_KEYS = "sites.pub"
"""Public keys of all sites."""

JOIN = "join.txt"
SUPERLINK = "superlink.txt"
PROXY = "nginx.conf"
LOGS = "nginx"


def site_path(name: str, file: str = "") -> str:
    """Return the path of a site's folder, or of a file in it."""
    return f"sites/{name}/{file}"


def private_key_path(name: str) -> str:
    """Return the path of a site's private key."""
    return site_path(name, f"{name}.key")


def public_key_path(name: str) -> str:
    """Return the path of a site's public key."""
    return site_path(name, f"{name}.pub")
