"""The node's own state: everything that is true without asking another node.

Promises: a byte counted as `local` is synced and hashed on this node's drive; a record read from the catalog has been
checked; nothing read from disk is believed before its checksum.

Layers, lowest first: `ids` and `errors`; formats and pure logic (`catalog_format`, `checksum`, `segment_format`);
the catalog (`catalog_kv` the interface, `catalog_sqlite` and `catalog_etcd` its engines, `namespace` and `versions` the meaning);
the store (`store`, `segments`, `mount_db`, `seal`, `space`). May import nothing from `replication` or `fs`.
"""
