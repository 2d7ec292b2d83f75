"""What lies where in the folder that says who may come in."""

RECORD_FILE, LOCK_FILE = "access.json", ".lock"
CA, CA_KEY = "ca.crt", "ca/ca.key"
CERTIFICATE, KEY = "server/server.crt", "server/server.key"
SITE_KEYS = "sites.pub"
JOIN, SUPERLINK, PROXY, LOGS = "join.txt", "superlink.txt", "nginx.conf", "nginx"


def site_path(name: str, file: str = "") -> str:
    return f"sites/{name}/{file}"


def private_key_path(name: str) -> str:
    return site_path(name, f"{name}.key")


def public_key_path(name: str) -> str:
    return site_path(name, f"{name}.pub")
