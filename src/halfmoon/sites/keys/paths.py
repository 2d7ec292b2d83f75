"""What lies where in the folder that says who may come in."""

RECORD, LOCK = "access.json", ".lock"
CA, CA_KEY = "ca.crt", "ca/ca.key"
CERTIFICATE, KEY = "server/server.crt", "server/server.key"
SITE_KEYS = "sites.pub"
JOIN, SUPERLINK, PROXY, LOGS = "join.txt", "superlink.txt", "nginx.conf", "nginx"


def site(name: str, file: str = "") -> str:
    return f"sites/{name}/{file}"


def private(name: str) -> str:
    return site(name, f"{name}.key")


def public(name: str) -> str:
    return site(name, f"{name}.pub")
