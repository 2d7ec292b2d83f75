"""The one ServerApp: it plays the federation of the file `run_config` "federation" in the run folder "run-dir".

Sites are waited for without end, or for `run_config` "patience" seconds. Where they are known by their keys, the file
`run_config` "keys" says whose key each node has.
"""

import math
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from halfmoon.core.errors import UserError
from halfmoon.federation.flower.link import GridPost
from halfmoon.federation.server.plan import load
from halfmoon.federation.server.server import FederationServer

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play the rounds that are left; what stops it is the last line of its log, which begins with "stopped: "."""
    host = FederationServer(load(Path(str(context.run_config["federation"]))), Path(str(context.run_config["run-dir"])))
    host.make()
    keys = context.run_config.get("keys") or None
    try:
        host.serve(
            GridPost(grid, None if keys is None else Path(str(keys)), host.most),
            float(context.run_config.get("patience", math.inf)),
        )
    except UserError as error:
        host.log.say(f"stopped: {error}")
        raise
