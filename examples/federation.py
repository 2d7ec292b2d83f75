# Learn what a federation is: a server and three sites as processes of one machine, over the network.
# %% [markdown]
# # A federation of three sites
# Each site has a folder of images, a few of them labeled. Only numbers of the model travel. Write the digits as the
# folders of three sites; in real life each site has its own.
# %%
import socket
import subprocess
import sys
from pathlib import Path

import halfmoon


def command(*words):
    return [sys.executable, "-m", "halfmoon", *map(str, words)]


subprocess.run(
    command("site", "export", "digits", "--sites", 3, "--labels-per-class", 4, "--out", "rehearsal"), check=True
)
plan = Path("rehearsal/federation.toml")
plan.write_text("rounds = 4\n" + plan.read_text())
sorted(path.name for path in Path("rehearsal").iterdir())
# %% [markdown]
# Start the server and the sites. A site calls the server, nobody calls a site. They end by themselves.
# %%
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
server = subprocess.Popen(command("serve", plan, "--run-dir", "first", "--port", port), **quiet)
address = f"127.0.0.1:{port}"
sites = [
    subprocess.Popen(
        command("site", "join", "--server", address, "--site", f"rehearsal/{name}", "--name", name, "--terms", "any"),
        **quiet,
    )
    for name in ("site-00", "site-01", "site-02")
]
try:
    codes = [process.wait(900) for process in (server, *sites)]
finally:
    for process in (server, *sites):
        process.terminate()
codes
# %% [markdown]
# The server's run folder is one like any other: results, model, and what was sent.
# %%
results = halfmoon.load_run("first")
results
# %%
results.plot()
# %%
results.model.evaluate("rehearsal/test")["accuracy"]
