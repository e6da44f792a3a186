"""Publishes the values that changed since the version that servers have, bit for bit, in place of all
weights: for servers that read what is staged through a slow link.

    trainer's side                          server's side
    ────────────────────────────────────────────────────────────────────────────────────────────
    history    the last two versions        cache      the newest version, one for a machine's servers
    files      what changed, the digests    version    whole files from the base and a delta
    feed       which server reads what      maker      both, on a thread of a server's worker
                             codec: the change of a block of numbers

A server loads whole files as without deltas, from its cache. So nothing here depends on how it divides,
fuses, packs or quantises tensors, and vLLM's loaders, which load a layer completely or not at all, get
what they need. The price is one version's room beside each machine's servers (a second one while the
next is made) and a second copy of the weights in the trainer's host memory.

Each delta names the digest of its base and of its result. A server that has another base, or gets
another result, refuses it and gets whole files; nothing that it has loaded changes before.
"""

COPIED = 2  # versions in the trainer's host memory: the servers' and the newest
CACHED = 2  # versions in a cache, while the second is made
