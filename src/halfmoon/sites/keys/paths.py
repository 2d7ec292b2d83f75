"""What lies where in the folder that says who may come in."""

RECORD, LOCK = "access.json", ".lock"
CA, CA_KEY = "ca.crt", "ca/ca.key"
CERTIFICATE, KEY = "server/server.crt", "server/server.key"
SITE_KEYS = "sites.pub"
SUPERLINK, PROXY, LOGS = "superlink.txt", "nginx.conf", "nginx"


def site(name: str, file: str = "") -> str:
    """Return the path of a site's file, or of its folder, which is what its people are handed."""
    return f"sites/{name}/{file}"


def private(name: str) -> str:
    """Return the path of a site's private key, which is there until somebody takes it away."""
    return site(name, f"{name}.key")


def public(name: str) -> str:
    """Return the path of a site's public key."""
    return site(name, f"{name}.pub")


def authority(name: str) -> str:
    """Return the path of a site's copy of the authority's certificate."""
    return site(name, CA)


def known(name: str) -> str:
    """Return the path of a site's copy of the public keys of all sites."""
    return site(name, SITE_KEYS)


def join(name: str) -> str:
    """Return the path of the text that says how a site joins."""
    return site(name, "join.txt")
