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
    """Run the remaining rounds of a federation: Flower calls this function at the server.

    A UserError is recorded as the event "stopped", with which `halfmoon serve` ends instead of restarting this program.

    Args:
        grid: exchanges messages with the sites.
        context: its `run_config` has the federation's file, the run folder, the file with the owners of keys, and the
            seconds to wait for sites.
    """
    options = context.run_config
    run_folder = Path(str(options["run-dir"]))
    keys_option = options.get("keys")
    keys_file = Path(str(keys_option)) if keys_option else None
    try:
        plan = load_plan(Path(str(options["federation"])))
        server = FederationServer(plan, run_folder)
        server.prepare()
        transport = GridTransport(grid, keys_file, server.max_reply_bytes)
        server.serve(transport, patience=float(options.get("patience", math.inf)))
    except UserError as error:
        # Without a run folder there is no log. Flower's own log has the error in any case, because it is raised again.
        if RunFolder.exists(run_folder):
            EventLog(run_folder / SERVER_LOG).record("stopped", f"stopped: {error}", reason=str(error))
        raise
