"""The server of a federation: rounds over the network, requests to sites, and checks of their replies.

From the rounds down to the network, each class uses the next one:

| class | module | task |
|---|---|---|
| `FederationServer` | `server` | opens the run folder, runs the rounds, delivers the final model |
| `RemoteRuntime` | `runtime` | a round as in a simulation, which is retried if too few sites reply |
| `SiteClients` | `site_clients` | one query: a request for each client, and its result in the order of the clients |
| `SiteCalls` | `calls` | requests as bytes, and the checks that decide which replies may change the model |
| `ClientManager` | `sessions` | one exchange of bytes: timeouts, late replies, sites that disconnect or restart |
| `Connection` | `connection` | a transport that may fail for a while |
| `GridTransport` | `halfmoon.federation.transport.grid` | Flower's Grid |
"""
