"""What people touch: the mount, the command line, the local cluster; it assembles the other rooms.

Layers, lowest first: the kernel's messages (`fuse_format`, pure); the conversation with it (`fuse_session`), the mount point
(`fuse_device`, `mount_table`) and backing files (`backing`); inodes in use and what stat shows (`open_files`, `attributes`); the
operations (`names`, `files`, `inode_operations`); what happens after a close (`settle`, `reclaim`); the three processes, each
with one composition root (`supervisor`, `mount_process`, `agent_process`); the command line (`cli`).
"""
