"""The texts that lie beside the keys: nginx's configuration, and the commands for the people of server and sites."""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.sites.keys.key_folder import Record
from halfmoon.sites.keys.paths import CA, CERTIFICATE, KEY, LOGS, PROXY, SITE_KEYS

BODY = "6m"
"""The largest body of a request: Flower cuts what is sent into pieces of 5 MiB, each with a few hundred bytes more."""

CONNECTIONS, FILES, BACKLOG, HANDSHAKE = 16384, 32768, 4096, 5
"""Of nginx: connections of a worker, open files, connections that wait for it, and seconds for TLS and a header."""

HALF_OPEN = 256
"""New connections of one address that a firewall lets through at once, where one stands before the proxy."""

_UNSAFE = re.compile(r'["\\$\x00-\x1f\x7f]')


def proxy(folder: Path, record: Record) -> str:
    """Return a configuration of nginx that lets sites through to the SuperLink, and nobody to anything else.

    Raise UserError where the folder's path cannot stand in it.
    """
    if _UNSAFE.search(str(folder)):
        raise UserError(
            f"{str(folder)!r} cannot stand in nginx's configuration: choose a path without quotes, \\ and $."
        )
    logs = folder / LOGS
    return _whole(folder) + _requests(logs, record) + _server(folder, record) + "}\n"


def _whole(folder: Path) -> str:
    """Return what nginx does as a whole: files, processes, connections."""
    logs = folder / LOGS
    return f"""# The one door for other machines: sites come in here, to what Flower has for sites and to nothing else.
# Start, as the user who owns the folder:  {nginx(folder)}
# After a change or a new certificate:     {nginx(folder)} -s reload
# End:                                     {nginx(folder)} -s quit
# The paths are absolute: whoever moves the folder has to change them here.

pid "{logs}/nginx.pid";
error_log "{logs}/error.log" warn;
worker_processes auto;

# Whoever connects and says nothing has a connection until client_header_timeout is over, and limit_conn does not count
# it yet: there have to be more than one address can hold for that long. A connection without a word costs about 500 B.
# Where the system gives nginx fewer files than this, error.log says so (ulimit -n).
worker_rlimit_nofile {FILES};

events {{
    worker_connections {CONNECTIONS};
    multi_accept on;
}}

"""


def _requests(logs: Path, record: Record) -> str:
    """Return the beginning of the block `http`: logs, limits of one address, and the SuperLink behind."""
    return f"""http {{
    server_tokens off;
    client_body_temp_path "{logs}/body";
    proxy_temp_path "{logs}/proxy";
    fastcgi_temp_path "{logs}/fastcgi";
    uwsgi_temp_path "{logs}/uwsgi";
    scgi_temp_path "{logs}/scgi";

    # What is refused or fails has a line in access.log. A site asks every few seconds whether there is work: without
    # the condition each site writes about 5 MB a day.
    map $status $worth_a_line {{
        ~^2 0;
        default 1;
    }}
    log_format plain '$remote_addr [$time_iso8601] $status "$request" $request_length bytes, $request_time s';
    access_log "{logs}/access.log" plain if=$worth_a_line;

    # Of one address. A site has two or three connections and asks once a second, when it fetches a model some dozen
    # times; many sites behind one address fit in. The answer to what is too much is 503: a site then tries again.
    limit_conn_zone $binary_remote_addr zone=connections:1m;
    limit_req_zone $binary_remote_addr zone=requests:1m rate=500r/s;

    upstream superlink {{
        server 127.0.0.1:{record.port};
        keepalive 32;
        keepalive_timeout 4s;  # the SuperLink closes what is idle after 5
    }}

"""


def _server(folder: Path, record: Record) -> str:
    """Return the block `server`: TLS, time limits, and the paths that sites need."""
    listen = f"listen {record.listen} ssl backlog={BACKLOG};"
    if _sixes():
        listen += f"\n        listen [::]:{record.listen} ssl backlog={BACKLOG};"
    return f"""    server {{
        {listen}
        ssl_certificate "{folder / CERTIFICATE}";
        ssl_certificate_key "{folder / KEY}";
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_ciphers ECDHE+AESGCM:ECDHE+CHACHA20;  # of TLS 1.2
        ssl_session_cache shared:sessions:1m;
        ssl_session_tickets off;

        limit_conn connections 256;
        limit_req zone=requests burst=2000 nodelay;

        # Bodies stay in memory, whole, before the SuperLink hears of them: who sends slowly keeps nobody waiting.
        client_max_body_size {BODY};
        client_body_buffer_size {BODY};
        client_header_timeout {HANDSHAKE}s;  # also of the TLS handshake
        reset_timedout_connection on;
        client_body_timeout 60s;  # between two pieces
        send_timeout 60s;
        keepalive_timeout 75s;

        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $host;
        proxy_set_header X-Forwarded-For $remote_addr;
        proxy_connect_timeout 5s;
        proxy_send_timeout 120s;
        proxy_read_timeout 120s;
        proxy_max_temp_file_size 0;
        proxy_ssl_protocols TLSv1.2 TLSv1.3;
        proxy_ssl_trusted_certificate "{folder / CA}";
        proxy_ssl_verify on;
        proxy_ssl_name localhost;

        # With a path after the address nginx passes on the one that it has compared, not the one that was sent.
        location /v1/fleet/ {{
            limit_except POST {{ deny all; }}
            proxy_pass https://superlink/v1/fleet/;
        }}
        location = /health {{
            limit_except GET {{ deny all; }}
            proxy_pass https://superlink/health;
        }}
        # Here Flower would take orders to run programs at all sites.
        location / {{
            return 403;
        }}
        location = /v1/fleet {{
            return 403;  # nginx would answer with a way to /v1/fleet/
        }}
    }}
"""


def nginx(folder: Path) -> str:
    """Return the command that starts nginx, and with other words behind it tells it something."""
    return f"nginx -c {shlex.quote(str(folder / PROXY))}"


def superlink(folder: Path, record: Record) -> str:
    """Return what the server's people start, with halfmoon or with Flower alone."""
    quoted = {name: shlex.quote(str(folder / name)) for name in (CA, CERTIFICATE, KEY)}
    return f"""With halfmoon, which also registers the sites and notices at once when they change:

    halfmoon serve CONFIG.toml --port {record.port} --access {shlex.quote(str(folder))}
    {nginx(folder)}

With Flower alone; each site has to be registered by hand:

    flower-superlink --host 127.0.0.1 --port {record.port} --ssl-ca-certfile {quoted[CA]} --ssl-certfile \
{quoted[CERTIFICATE]} --ssl-keyfile {quoted[KEY]} --enable-supernode-auth --database state.db \
--disable-runtime-dependency-installation
    flwr supernode register {shlex.quote(str(folder))}/sites/NAME/NAME.pub CONNECTION --name NAME
    {nginx(folder)}

Other machines need port {record.listen} (TCP), where nginx listens, and no other. nginx holds ten thousand connections
that say nothing; against more of them a firewall counts what each address has open, before nginx sees it (as root):

    nft add table inet halfmoon
    nft add chain inet halfmoon input '{{ type filter hook input priority 0; }}'
    nft add set inet halfmoon open '{{ type ipv4_addr; flags dynamic; }}'
    nft add rule inet halfmoon input tcp dport {record.listen} ct state new add @open \
'{{ ip saddr ct count over {HALF_OPEN} }}' drop
"""


def join(name: str, record: Record, here: bool) -> str:
    """Return what a site's people start; `here` says that its private key was made beside this text."""
    key = f"{name}.key"
    secret = (
        f"{key} is secret: who has it can come in as {name}. Keep it readable by one user alone (chmod 600)."
        if here
        else f"{key} stands for the private key that was made at the site, and belongs to {name}.pub."
    )
    return f"""{secret}

With halfmoon:

    halfmoon site join --server {record.address} --site FOLDER --name {name} --ca ca.crt --key {key} \
--site-keys {SITE_KEYS}

{SITE_KEYS} has the public keys of all sites. Compare them with the other sites' people (ssh-keygen -l -f {SITE_KEYS}):
with secure_aggregation they are what keeps a server from putting keys of its own in.

With Flower alone, where FOLDER, KEY and SITES are the absolute paths of the images, {key} and {SITE_KEYS}, and HASH is
that of the terms which the site agrees to (halfmoon site terms shows it):

    flower-supernode --superlink {record.address} --root-certificates ca.crt --auth-supernode-private-key {key} \
--node-config 'name="{name}" folder="FOLDER" terms="HASH" key="KEY" site-keys="SITES"'
"""


def _sixes() -> bool:
    """Say whether this machine speaks IPv6: where it does not, nginx would not start."""
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return False
    return True
