"""Two environments of the package nemo-gym, served by its own code in a Python that has it. Prints their addresses."""

from __future__ import annotations

import socket
from importlib import import_module
from threading import Thread

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

HOST = "127.0.0.1"
SERVERS = {
    "example_session_state_mgmt": "StatefulCounterResourcesServer",
    "example_multi_turn_gymnasium": "ExampleMultiTurnEnv",
}


def start(name: str, kind: str) -> str:
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    made = getattr(import_module(f"resources_servers.{name}.app"), kind)
    config = made.model_fields["config"].annotation
    head = BaseServerConfig(host=HOST, port=1)
    server = made(
        config=config(name=name, host=HOST, port=port, entrypoint="app.py"),
        server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})),
    )
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    Thread(target=uvicorn.Server(uvicorn.Config(app, log_level="error")).run, args=([listening],)).start()
    return f"http://{HOST}:{port}"


if __name__ == "__main__":
    print(*(start(name, kind) for name, kind in SERVERS.items()), flush=True)
