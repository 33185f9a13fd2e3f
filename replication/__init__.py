"""Shards and peers: how bytes of one node outlive that node.

Promises: a version is `protected` only after every holder has durably stored exactly the root that was sent; bytes
handed to a reader match the content root in the catalog; nothing that comes from the network names a path.

Layers, lowest first: pure logic (`cauchy`, `stripes`, `placement`, `frame_format`, `shard_format`); the codec
(`codec` chooses, `codec_isal` and `codec_numpy` compute); what a node holds for others (`shard_store`,
`small_copies`, `agent_db`); the conversation (`peer_server`, `peer_client`); the work (`replicator`, `restore`,
`verify`). May import `cache`, never `fs`.
"""
