# Learn to run a federation: a server and three sites, as processes of one machine that communicate over the network.
# %% [markdown]
# # A federation of three sites
# Each site has a folder of images, and a few of them have labels. Only parameters of the model are sent. This cell
# writes the digits as the folders of three sites; in a real federation every site already has its folder.
# %%
import socket
import subprocess
import sys
from pathlib import Path

import halfmoon


def command(*arguments):
    return [sys.executable, "-m", "halfmoon", *map(str, arguments)]


subprocess.run(
    command("site", "export", "digits", "--sites", 3, "--labels-per-class", 4, "--out", "rehearsal"), check=True
)
plan = Path("rehearsal/federation.toml")
plan.write_text("rounds = 4\n" + plan.read_text())
sorted(path.name for path in Path("rehearsal").iterdir())
# %% [markdown]
# Start the server and the sites. Sites connect to the server, so a site needs no open port. All processes exit after
# the last round.
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
# The server writes a run folder as `halfmoon run` does, with the results, the model, and what was sent.
# %%
results = halfmoon.load_run("first")
results
# %%
results.plot()
# %%
results.model.evaluate("rehearsal/test")["accuracy"]
