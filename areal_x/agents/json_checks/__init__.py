"""JSON from models, agents and servers, and the JSON schemas that they bring: checked within bounds.

`json_bounds` limits what is parsed, `schemas` validates schemas and values in a process that the
kernel ends, `schema_worker` is that process. The tools and the gateway only word the errors.
"""
