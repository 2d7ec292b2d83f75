"""The one ServerApp: it plays the federation of the file `run_config` "federation" in the run folder "run-dir".

Sites are waited for without end, or for `run_config` "patience" seconds. Where they are known by their keys, the file
`run_config` "keys" says whose key each node has.
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
    """Play the rounds that are left; what stops it is the last line of its log, which begins with "stopped: "."""
    facts = context.run_config
    run, keys = Path(str(facts["run-dir"])), facts.get("keys") or None
    try:
        host = FederationServer(load_plan(Path(str(facts["federation"]))), run)
        host.prepare()
        post = GridTransport(grid, None if keys is None else Path(str(keys)), host.max_reply_bytes)
        host.serve(post, float(facts.get("patience", math.inf)))
    except UserError as error:
        if RunFolder.exists(run):
            EventLog(run / SERVER_LOG).record("stopped", f"stopped: {error}", reason=str(error))
        raise
