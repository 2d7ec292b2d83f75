"""Flower's ServerApp: runs the federation of the file `run_config` "federation" in the run folder "run-dir".

The server waits for sites forever, or for `run_config` "patience" seconds. If sites have keys, the file `run_config`
"keys" has the owner of each node's key.
"""

import math
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from halfmoon.core.errors import UserError
from halfmoon.federation.server.plan import load_plan
from halfmoon.federation.server.server import FederationServer
from halfmoon.federation.transport.grid import GridTransport
from halfmoon.storage.events import SERVER_LOG, EventLog
from halfmoon.storage.run_folder import RunFolder

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the remaining rounds. A user error is recorded as the event "stopped", with which `halfmoon serve` ends."""
    options = context.run_config
    run_folder = Path(str(options["run-dir"]))
    keys = options.get("keys") or None
    try:
        server = FederationServer(load_plan(Path(str(options["federation"]))), run_folder)
        server.prepare()
        transport = GridTransport(grid, None if keys is None else Path(str(keys)), server.max_reply_bytes)
        server.serve(transport, float(options.get("patience", math.inf)))
    except UserError as error:
        if RunFolder.exists(run_folder):
            EventLog(run_folder / SERVER_LOG).record("stopped", f"stopped: {error}", reason=str(error))
        raise
