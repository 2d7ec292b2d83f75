"""What lies where in the folder that says who may come in."""

RECORD, LOCK = "access.json", ".lock"
CA, CA_KEY = "ca.crt", "ca/ca.key"
CERTIFICATE, KEY = "server/server.crt", "server/server.key"
SITE_KEYS = "sites.pub"
SUPERLINK, PROXY, LOGS = "superlink.txt", "nginx.conf", "nginx"


def site(name: str, file: str = "") -> str:
    return f"sites/{name}/{file}"


def private(name: str) -> str:
    return site(name, f"{name}.key")


def public(name: str) -> str:
    return site(name, f"{name}.pub")


def authority(name: str) -> str:
    return site(name, CA)


def site_keys(name: str) -> str:
    return site(name, SITE_KEYS)


def join(name: str) -> str:
    return site(name, "join.txt")
