"""What people touch: the mount, the command line, the local cluster; it assembles the other rooms.

Layers, lowest first: pure wire structures (`fuse_format`, `channel_rewrite`); the channel and the backing files
(`channel`, `backing`); inodes in use and the operations (`open_files`, `operations`, `fuse_errors`); the three
processes, each with one composition root (`supervisor`, `mount_process`, `agent_process`); the command line (`cli`).
"""
