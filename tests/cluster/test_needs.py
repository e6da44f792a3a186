"""What a run needs of the nodes, compared with every way to place it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from areal_x.cluster.config import ClusterConfig
from areal_x.cluster.needs import Need, Node, Resources, Servers, check_needs, needs_of, with_roles
from areal_x.errors import ConfigError

GPUS = 8


def needs(processes: int, servers: int, width: int, node: Resources, hosts: int = 1, **cluster: object) -> list[Need]:
    placed = Servers(servers, width, hosts, "vllm") if servers else None
    return needs_of("torch", processes, placed, ClusterConfig(**cluster), [node])  # type: ignore[arg-type]


def has_room(processes: int, servers: int, width: int, nodes: int, gpus: int, apart: bool) -> bool:
    """By trying how many servers each node has, the ranks, of one GPU each, being beside them or on nodes of their own."""
    for counts in itertools.combinations_with_replacement(range(gpus // width + 1), nodes):
        free = (gpus - count * width for count in counts if not (apart and count))
        if sum(counts) >= servers and sum(free) >= processes:
            return True
    return False


@pytest.mark.parametrize("apart", [False, True])
def test_what_has_room_is_accepted_and_nothing_else(apart: bool) -> None:
    roles = {"ranks_on": "train", "servers_on": "serve"} if apart else {}
    described = {width: needs(1, 1, width, {"GPU": GPUS}, **roles) for width in (1, 2, 4, 8)}
    for nodes, processes, servers, width in itertools.product((1, 2, 3), range(1, 26, 3), range(1, 8), (1, 2, 4, 8)):
        node = {"GPU": GPUS}
        wanted = [replace(x, count=y) for x, y in zip(described[width], (processes, servers), strict=True)]
        try:
            check_needs(wanted, with_roles(wanted, nodes, node))
            accepted = True
        except ConfigError:
            accepted = False
        assert accepted == has_room(processes, servers, width, nodes, GPUS, apart), (nodes, processes, servers, width)


def test_the_parts_of_a_server_are_on_nodes_of_their_own() -> None:
    """Two servers, each of 8 GPUs on two nodes, beside ranks."""
    for nodes, processes in itertools.product((1, 2, 3, 4), (1, 8, 9, 16)):
        wanted = needs(processes, 2, 8, {"GPU": GPUS}, hosts=2)
        try:
            check_needs(wanted, with_roles(wanted, nodes, {"GPU": GPUS}))
            accepted = True
        except ConfigError:
            accepted = False
        full, rest = divmod(processes, GPUS)
        room = [min(2, (GPUS - rest) // 4), *[2] * (nodes - full - 1)] if nodes > full else []
        assert accepted == (processes <= GPUS * nodes and sum(room) >= 4), (nodes, processes)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ((17, 0, 1, 2, {}), "mesh.processes = 17 cannot work: it must be at most 16, 8 on each of 2 nodes"),
        (
            (8, 3, 4, 2, {}),
            "vllm.servers = 3 cannot work: it must be at most 2, 2 on each of 2 nodes, beside 8 ranks of 1 GPU and 1 CPU",
        ),
        (
            (1, 1, 16, 2, {}),
            "cluster.server_accelerators = 16 cannot work: it must be at most 8, as many as a node of the cluster has",
        ),
        (
            (8, 2, 16, 2, {"hosts": 2}),
            "vllm.servers = 2 cannot work: it must be at most 0, each in 2 parts, a node each, of 2 nodes, beside 8 ranks",
        ),
        (
            (8, 3, 8, 3, {"ranks_on": "a", "servers_on": "b"}),
            "vllm.servers = 3 cannot work: it must be at most 2, a node each, of 2 nodes with role=b",
        ),
        (
            (1, 0, 1, 2, {"cpus": 99.0}),
            "cluster.cpus = 99.0 cannot work: it must be at most 64, as many as a node of the cluster has",
        ),
        ((9, 0, 1, 2, {"cpus": 16.0}), "mesh.processes = 9 cannot work: it must be at most 8, 4 on each of 2 nodes"),
    ],
)
def test_what_has_no_room_is_refused_with_what_would_work(asked, sentence: str) -> None:
    processes, servers, width, nodes, cluster = asked
    node = {"GPU": GPUS, "CPU": 64}
    wanted = needs(processes, servers, width, node, **cluster)
    with pytest.raises(ConfigError) as refused:
        check_needs(wanted, with_roles(wanted, nodes, node))
    assert str(refused.value).startswith(sentence)


def test_nodes_are_labelled_from_the_first_on_and_spare_ones_serve() -> None:
    node = {"GPU": GPUS}
    wanted = needs(16, 2, 4, node, ranks_on="train", servers_on="serve")
    assert [x.role for x in with_roles(wanted, 4, node)] == ["train", "train", "serve", "serve"]
    same = needs(8, 1, 8, node, ranks_on="all", servers_on="all")
    assert [x.role for x in with_roles(same, 2, node)] == ["all", "all"]
    only_servers = needs(4, 1, 4, node, servers_on="serve")
    assert [x.role for x in with_roles(only_servers, 1, node)] == ["serve"]
    only_ranks = needs(8, 1, 4, node, ranks_on="train")
    assert [x.role for x in with_roles(only_ranks, 2, node)] == ["train", ""]


def test_nodes_that_differ_are_filled_one_by_one() -> None:
    nodes = [Node({"GPU": 4.0, "CPU": 8.0}), Node({"GPU": 8.0, "CPU": 8.0}), Node({"CPU": 64.0})]
    wanted = needs(4, 2, 4, nodes[1].resources)
    check_needs(wanted, nodes)
    with pytest.raises(ConfigError, match=r"vllm\.servers = 3 cannot work: it must be at most 2"):
        check_needs(needs(4, 3, 4, nodes[1].resources), nodes)


def test_shards_are_beside_others_or_on_nodes_of_their_own() -> None:
    node = {"GPU": 1, "CPU": 4}
    beside = needs(2, 0, 1, node, shards=6)
    assert str(beside[1]) == "6 shards of 1 CPU"
    check_needs(beside, with_roles(beside, 2, node))  # 3 CPUs are left on each
    more = needs(2, 0, 1, node, shards=7)
    sentence = r"^cluster\.shards = 7 cannot work: it must be at most 6, 4 on each of 2 nodes, beside 2 "
    with pytest.raises(ConfigError, match=sentence):
        check_needs(more, with_roles(more, 2, node))
    apart = needs(2, 1, 1, node, shards=5, shards_on="roll", servers_on="serve")
    nodes = with_roles(apart, 5, node)
    assert [x.role for x in nodes] == ["", "", "serve", "roll", "roll"]
    check_needs(apart, nodes)
    with pytest.raises(
        ConfigError, match=r"^cluster\.shards = 5 cannot work: it must be at most 4, 4 on the only node with role=roll"
    ):
        check_needs(apart, nodes[:-1])
