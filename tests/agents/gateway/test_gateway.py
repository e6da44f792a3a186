"""Sessions over a real server: keys, rewards, limits, clients that disconnect, concurrency, and the end."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import pytest

from areal_x.agents.gateway import Gateway, SessionLimits
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import EngineError
from areal_x.types import Failed, Scored, TimedOut
from tests.agents.gateway.scripted import END, RUN, Letters, Scripted, read

HI = [{"role": "user", "content": "hi"}]


def post(one, path, body=None, key=None, **more):
    headers = {"authorization": f"Bearer {one.session.key if key is None else key}"}
    return httpx.post(f"{one.session.url}{path}", json=body, headers=headers, **more)


def in_background(function, *arguments):
    """Returns a future; the pool's thread ends with it."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    return future


@pytest.fixture
def gateway_of(run):
    """Starts gateways with settings of their own."""
    started = []

    def start(**settings):
        async def begin():
            served = Gateway(**settings)
            await served.start()
            return served

        started.append(run(begin()))
        return started[-1]

    yield start
    for served in started:
        run(served.close())


WITHOUT = """
import importlib.util as util
found = util.find_spec
util.find_spec = lambda name, package=None: None if name == {package!r} else found(name, package)
from areal_x.errors import UserError
try:
    {needing}
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("package", "needing"),
    [
        ("starlette", "import areal_x.agents.online"),
        ("pydantic", "import areal_x.agents.agent"),
        ("uvicorn", "from areal_x.agents import Gateway"),
        ("jsonschema", "from areal_x.agents import Calculator, Toolbox; Toolbox([Calculator()])"),
    ],
)
def test_a_package_of_the_extra_that_is_missing_is_named_with_the_command(package, needing):
    program = WITHOUT.format(package=package, needing=needing)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert package in said
    assert "pip install 'areal-x[agents]'" in said


# Keys and addresses


def test_a_session_is_reached_by_its_url_or_by_its_key_alone_with_or_without_the_version(talk, gateway):
    one = talk()
    bases = [one.session.url, one.session.base_url, gateway.url, f"{gateway.url}/v1"]
    for base in bases:
        client = one.client(openai.OpenAI, base_url=base)
        assert client.chat.completions.create(model="m", messages=HI).choices[0].message.content == "hello"
        client = one.client(anthropic.Anthropic, base_url=base)
        assert client.messages.create(model="m", messages=HI, max_tokens=9).content[0].text == "hello"
    assert len(one.calls()) == 2 * len(bases)


def test_either_header_brings_the_key_and_a_foreign_one_beside_it_does_no_harm(talk):
    one = talk()
    key = one.session.key
    for headers in (
        {"authorization": f"Bearer {key}"},
        {"Authorization": f"bearer {key}"},
        {"x-api-key": key},
        {"x-api-key": "sk-of-someone", "authorization": f"Bearer {key}"},
        {"x-api-key": key, "authorization": "Basic abc"},
    ):
        assert httpx.get(one.session.url, headers=headers).status_code == 200


def test_a_wrong_key_a_missing_one_and_that_of_another_session_are_refused(talk, gateway):
    one, other = talk(), talk()
    for key in ("sk-of-someone", other.session.key, gateway.key, one.session.key[:-1]):
        client = one.client(openai.OpenAI, api_key=key)
        with pytest.raises(openai.AuthenticationError) as error:
            client.chat.completions.create(model="m", messages=HI)
        assert error.value.code == "invalid_api_key"
        assert key not in error.value.message
    client = one.client(anthropic.Anthropic, base_url=one.session.url, api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model="m", messages=HI, max_tokens=9)
    for base in (one.session.url, f"{gateway.url}/v1"):
        assert httpx.get(f"{base}/models").status_code == 401
    assert one.calls() == other.calls() == ()


def test_a_session_that_never_was_is_not_found(talk, gateway):
    one = talk()
    with pytest.raises(openai.NotFoundError, match="no session 'nobody'"):
        one.client(openai.OpenAI, base_url=f"{gateway.url}/sessions/nobody/v1").models.list()
    client = one.client(anthropic.Anthropic, base_url=f"{gateway.url}/sessions/nobody")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="m", messages=HI, max_tokens=9)


def test_what_is_not_served_is_said_in_the_words_of_the_clients_api(talk):
    one = talk()
    with pytest.raises(openai.NotFoundError, match="not served here"):
        one.openai.embeddings.create(model="m", input="x")
    with pytest.raises(anthropic.NotFoundError, match="not served here") as error:
        one.anthropic.messages.batches.list()
    assert error.value.body["error"]["type"] == "not_found_error"
    assert post(one, "/v1/models").status_code == 405


def test_the_model_is_listed_for_both_clients(talk):
    one = talk(context=512)
    (model,) = one.openai.models.list()
    assert (model.id, model.max_model_len) == ("policy", 512)
    (model,) = one.anthropic.models.list()
    assert (model.id, model.type) == ("policy", "model")
    assert one.openai.models.retrieve("policy").id == "policy"
    with pytest.raises(openai.NotFoundError):
        one.openai.models.retrieve("gpt-4")


def test_keys_appear_neither_in_a_representation_nor_in_what_a_session_tells(talk):
    one = talk()
    assert one.session.key not in json.dumps(httpx.get(one.session.url, headers={"x-api-key": one.session.key}).json())
    assert one.session.key not in repr(one.session)


# Rewards and the end


def test_an_agent_rewards_its_calls_and_ends_its_session(talk, run):
    one = talk()
    first, second = one.chat(), one.chat()
    assert post(one, "/reward", {"call": first.id, "reward": 0.25}).json() == {"call": first.id, "reward": 0.25}
    assert post(one, "/v1/reward", {"reward": -1}).json() == {"call": second.id, "reward": -1.0}
    assert [call.reward for call in one.calls()] == [0.25, -1.0]
    assert post(one, "/end", {"reward": 0.5}).json()["state"] == "scored"
    assert run(one.session.ended()) == Scored(0.5)


def test_the_workflow_wakes_as_soon_as_the_agent_ends(talk, run):
    one = talk()
    outcome = in_background(run, one.session.ended())
    one.chat()
    assert not outcome.done()
    post(one, "/reward", {"reward": 0.75})
    assert not outcome.done()
    post(one, "/v1/end")
    assert outcome.result(60) == Scored(0.75)


@pytest.mark.parametrize("path", ["/reward", "/end"])
@pytest.mark.parametrize("reward", ['"1"', "true", "NaN", "Infinity", "-1e999", "[1]", '{"a": 1}'])
def test_a_reward_that_is_no_finite_number_is_refused(talk, path, reward):
    one = talk()
    one.chat()
    headers = {"x-api-key": one.session.key}
    answer = httpx.post(f"{one.session.url}{path}", content=f'{{"reward": {reward}}}', headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "reward"
    assert one.session.outcome is None


def test_a_reward_needs_a_number_and_knows_no_other_parameter(talk):
    one = talk()
    one.chat()
    assert post(one, "/reward", {}).status_code == 400
    assert post(one, "/reward", {"reward": 1, "cal": "x"}).json()["error"]["param"] == "cal"


def test_a_second_reward_an_unknown_call_and_what_comes_after_the_end_are_refused(talk):
    one = talk()
    assert post(one, "/reward", {"reward": 1}).status_code == 404
    call = one.chat().id
    post(one, "/reward", {"reward": 1})
    for body in ({"reward": 1}, {"reward": 1, "call": call}):
        assert post(one, "/reward", body).status_code == 409
    assert post(one, "/reward", {"reward": 1, "call": "nobody's"}).status_code == 404
    post(one, "/end", {"reward": 1})
    for answer in (post(one, "/reward", {"reward": 1, "call": call}), post(one, "/end", {"reward": 0}), post(one, "/end")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_over")
    with pytest.raises(openai.ConflictError):
        one.chat()
    with pytest.raises(anthropic.ConflictError):
        one.anthropic.messages.create(model="m", messages=HI, max_tokens=9)
    assert one.session.outcome == Scored(1.0)


def test_a_session_that_was_closed_is_over_for_its_agent_and_failed_for_the_workflow(talk, run):
    one = talk()
    one.chat()
    one.do(one.session.close)
    one.do(one.session.close)
    with pytest.raises(openai.ConflictError):
        one.chat()
    assert post(one, "/end", {"reward": 1}).status_code == 409
    assert run(one.session.ended()) == Failed("the session was closed before the agent ended it")
    assert len(one.calls()) == 1


def test_a_session_tells_its_state_in_numbers(talk):
    one = talk("four", limits=SessionLimits(calls=7))
    one.chat()
    post(one, "/reward", {"reward": 2})
    told = httpx.get(one.session.base_url, headers={"x-api-key": one.session.key}).json()
    assert told.pop("seconds") >= 0
    assert told == {
        "id": one.session.id,
        "state": "open",
        "calls": 1,
        "running": 0,
        "prompt_tokens": len(f"user:hi{END}assistant:"),
        "generated_tokens": 5,
        "rewards": {one.calls()[0].id: 2.0},
        "reward": None,
        "limits": {"calls": 7, "tokens": 1_000_000, "seconds": 3600.0, "idle_seconds": 600.0, "body_megabytes": 8.0},
        "overruled": {},
        "ignored": {},
    }
    post(one, "/end", {"reward": 3})
    told = httpx.get(one.session.url, headers={"x-api-key": one.session.key}).json()
    assert (told["state"], told["reward"]) == ("scored", 3.0)


# Limits and errors


def counted():
    """OpenAI's HTTP client, which counts its requests, so that a test sees any retry."""
    sent = []
    return sent, openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})


def test_used_up_calls_and_tokens_are_refused_without_another_try(talk):
    for limits, code in ((SessionLimits(calls=2), "session_calls"), (SessionLimits(tokens=7), "session_tokens")):
        one = talk("four", limits=limits)
        sent, http = counted()
        client = one.client(openai.OpenAI, http_client=http)
        for _ in range(2):
            client.chat.completions.create(model="m", messages=HI)
        with pytest.raises(openai.RateLimitError) as error:
            client.chat.completions.create(model="m", messages=HI)
        assert (error.value.code, len(sent), len(one.calls())) == (code, 3, 2)
        assert error.value.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in error.value.response.headers
        with pytest.raises(anthropic.RateLimitError):
            one.anthropic.messages.create(model="m", messages=HI, max_tokens=9)
        assert post(one, "/end", {"reward": 1}).status_code == 200


def test_a_body_that_is_too_large_is_refused_and_the_connection_goes_on(talk):
    one = talk(limits=SessionLimits(body_megabytes=0.25))
    client = one.openai
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 20_000_000}])
    assert (error.value.status_code, error.value.code) == (413, "request_too_large")
    with pytest.raises(anthropic.ContentTooLargeError):
        one.anthropic.messages.create(model="m", messages=[{"role": "user", "content": "x" * 300_000}], max_tokens=9)
    assert client.chat.completions.create(model="m", messages=HI).choices[0].message.content == "hello"


def test_a_lost_engine_is_said_to_the_agent_and_ends_the_workflow(talk, run):
    one = talk()
    one.engine.error = EngineError("server 3 died")
    with pytest.raises(openai.InternalServerError, match="server 3 died") as error:
        one.chat()
    assert error.value.status_code == 503
    with pytest.raises(EngineError, match="server 3 died"):
        run(one.session.ended())
    assert one.calls() == ()


def test_an_unexpected_error_is_said_and_logged_and_the_session_goes_on(talk, caplog):
    one = talk()
    one.engine.error = ZeroDivisionError("of what")
    sent, http = counted()
    client = one.client(openai.OpenAI, http_client=http)
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError: of what"):
        client.chat.completions.create(model="m", messages=HI)
    assert len(sent) == 1
    with pytest.raises(anthropic.InternalServerError) as error:
        one.anthropic.messages.create(model="m", messages=HI, max_tokens=9)
    assert error.value.body["error"]["type"] == "api_error"
    assert [record.getMessage().splitlines()[-1] for record in caplog.records] == ["ZeroDivisionError: of what"] * 2
    one.engine.error = None
    one.chat()
    assert len(one.calls()) == 1


def test_an_aborted_completion_is_no_call_and_clients_ask_again(talk):
    one = talk()
    one.engine.finish_reason = "abort"
    answer = post(one, "/v1/chat/completions", {"messages": HI})
    assert (answer.status_code, answer.headers["x-should-retry"], answer.headers["retry-after"]) == (503, "true", "1")
    assert one.calls() == ()

    def heals(prompt):
        one.engine.finish_reason = None
        return "hello"

    one.engine.says = lambda prompt: heals(prompt) if len(one.engine.requests) > 2 else "lost"
    assert one.chat().choices[0].message.content == "hello"
    assert len(one.calls()) == 1


def test_an_error_among_several_choices_leaves_no_call(talk):
    one = talk()
    said = iter(["fine"])
    one.engine.says = lambda prompt: next(said)
    with pytest.raises(openai.InternalServerError):
        one.chat(n=2)
    assert one.calls() == ()
    one.until(lambda: one.session.state.running == 0)


# Clients that go away, and streams that wait


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_generation_and_the_session_goes_on(talk, stream):
    one = talk(held=True)

    async def asks_and_leaves():
        async with one.openai_async as client:
            asked = asyncio.create_task(client.chat.completions.create(model="m", messages=HI, n=2, stream=stream))
            while one.engine.waiting < 2:
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])

    asyncio.run(asks_and_leaves())
    one.until(lambda: one.session.state.running == 0)
    assert one.engine.cancelled == 2
    one.do(one.engine.gate.set)
    assert one.chat().choices[0].message.content == "hello"
    assert len(one.calls()) == 1


def test_a_waiting_stream_shows_life_and_a_client_that_leaves_it_cancels_the_generation(talk, gateway_of):
    one = talk(held=True, on=gateway_of(beat_seconds=0.01))
    headers = {"authorization": f"Bearer {one.session.key}"}
    for path, beat in (("chat/completions", ": waiting"), ("messages", "event: ping"), ("responses", ": waiting")):
        body = {"input": "hi"} if path == "responses" else {"messages": HI}
        body |= {"max_tokens": 9} if path == "messages" else {}
        with httpx.stream("POST", f"{one.session.base_url}/{path}", json=body | {"stream": True}, headers=headers) as answer:
            lines = answer.iter_lines()
            assert [next(lines), answer.status_code] == [beat, 200]
        one.until(lambda: one.engine.waiting == 0 and one.session.state.running == 0)
    assert one.engine.cancelled == 3
    assert one.calls() == ()


def test_clients_pass_over_the_signs_of_life(talk, gateway_of):
    one = talk("hello", held=True, on=gateway_of(beat_seconds=0.01))
    chat = one.chat(stream=True)
    message = one.anthropic.messages.create(model="m", messages=HI, max_tokens=9, stream=True)
    response = one.openai.responses.create(model="m", input="hi", stream=True)
    one.do(one.engine.gate.set)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == "hello"
    assert "".join(e.delta.text for e in message if e.type == "content_block_delta") == "hello"
    assert list(response)[-1].response.output_text == "hello"


def test_an_error_after_a_stream_has_begun_is_raised_by_clients(talk, gateway_of):
    one = talk(held=True, on=gateway_of(beat_seconds=0.01))
    one.engine.error = ZeroDivisionError("of what")
    streams = [
        (openai.APIError, one.chat(stream=True)),
        (openai.APIError, one.openai.responses.create(model="m", input="hi", stream=True)),
        (anthropic.APIStatusError, one.anthropic.messages.create(model="m", messages=HI, max_tokens=9, stream=True)),
    ]
    one.do(one.engine.gate.set)
    for kind, stream in streams:
        with pytest.raises(kind, match="of what"):
            list(stream)


def test_an_error_before_a_stream_has_begun_keeps_its_status(talk):
    one = talk(context=10)
    with pytest.raises(openai.BadRequestError, match="too long"):
        one.chat("x" * 20, stream=True)
    with pytest.raises(anthropic.BadRequestError, match="too long"):
        one.anthropic.messages.create(model="m", messages=HI, max_tokens=9, stream=True)


def test_the_end_cancels_what_still_runs(talk):
    one = talk(held=True)
    answer = in_background(one.chat)
    one.until(lambda: one.engine.waiting == 1)
    post(one, "/end", {"reward": 1})
    with pytest.raises(openai.ConflictError, match="the session is over"):
        answer.result(60)
    assert one.engine.cancelled == 1
    assert one.calls() == ()


# Time


def test_a_session_that_nobody_uses_times_out(talk, run):
    one = talk(limits=SessionLimits(idle_seconds=0.01))
    outcome = run(one.session.ended())
    assert isinstance(outcome, TimedOut)
    assert outcome.seconds >= 0.01
    with pytest.raises(openai.ConflictError):
        one.chat()


def test_asking_for_its_state_keeps_a_session_open(talk):
    one = talk()
    one.session.state.touched -= 500
    before = one.session.state.touched
    httpx.get(one.session.url, headers={"x-api-key": "wrong"})
    assert one.session.state.touched == before
    httpx.get(one.session.url, headers={"x-api-key": one.session.key})
    assert one.session.state.touched >= before + 500


def test_a_session_beyond_its_time_is_ended_while_its_call_runs(talk, run):
    one = talk(held=True)
    answer = in_background(one.chat)
    one.until(lambda: one.engine.waiting == 1)
    one.session.state.opened -= 3600  # as if it had been opened so long ago
    assert isinstance(run(one.session.ended()), TimedOut)
    with pytest.raises(openai.ConflictError, match="the session is over"):
        answer.result(60)
    assert one.engine.cancelled == 1


# Many at once


def test_fifty_sessions_at_once_each_hold_their_own_tokens(talk):
    talks = [talk(lambda prompt: f"of {prompt.split('user:')[1].split(END)[0]}") for _ in range(50)]

    async def turns(index, one):
        async with one.openai_async as client:
            messages = []
            for turn in range(4):
                messages.append({"role": "user", "content": f"session {index}"})
                answer = await client.chat.completions.create(model="m", messages=messages, stream=turn % 2 == 0)
                if turn % 2 == 0:
                    text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
                else:
                    text = answer.choices[0].message.content
                messages.append({"role": "assistant", "content": text})
            await client.post("/reward", body={"reward": index}, cast_to=object)
            await client.post("/end", body={}, cast_to=object)

    async def everyone():
        await asyncio.gather(*(turns(index, one) for index, one in enumerate(talks)))

    asyncio.run(everyone())
    for index, one in enumerate(talks):
        calls = one.calls()
        assert [read(call.completion.tokens) for call in calls] == [f"of session {index}{END}"] * 4
        for turn, call in enumerate(calls):
            begun = f"user:session {index}{END}assistant:of session {index}{END}" * turn
            assert read(call.prompt) == f"{begun}user:session {index}{END}assistant:"
        assert one.session.outcome == Scored(float(index))


def test_one_session_answers_several_requests_at_once(talk):
    one = talk(lambda prompt: f"re {prompt.split('user:')[1].split(END)[0]}")

    async def everyone():
        async with one.openai_async as client:
            ask = client.chat.completions.create
            asked = [ask(model="m", messages=[{"role": "user", "content": str(i)}]) for i in range(20)]
            return await asyncio.gather(*asked)

    answers = asyncio.run(everyone())
    assert [answer.choices[0].message.content for answer in answers] == [f"re {i}" for i in range(20)]
    by_id = {call.id: read(call.completion.tokens) for call in one.calls()}
    assert by_id == {answer.id: f"re {i}{END}" for i, answer in enumerate(answers)}


# Sessions that agents ask for


def test_without_a_hook_no_agent_can_ask_for_a_session(gateway):
    answer = httpx.post(f"{gateway.url}/sessions", headers={"authorization": f"Bearer {gateway.key}"})
    assert answer.status_code == 404


def test_an_agent_asks_for_a_session_with_the_gateways_key_and_comes_again_while_there_is_none(gateway_of, run):
    waiting = []

    async def on_open(label):
        return waiting.pop() if waiting else None

    served = gateway_of(on_open=on_open)
    headers = {"authorization": f"Bearer {served.key}"}
    assert httpx.post(f"{served.url}/sessions", headers={"authorization": "Bearer wrong"}).status_code == 401
    answer = httpx.post(f"{served.url}/sessions", headers=headers)
    assert (answer.status_code, answer.headers["retry-after"], answer.headers["x-should-retry"]) == (503, "1", "true")

    async def an_episode_waits():
        waiting.append(served.open(Scripted(), Letters(), RUN))
        return waiting[0]

    session = run(an_episode_waits())
    answer = httpx.post(f"{served.url}/sessions", headers=headers)
    told = {"id": session.id, "key": session.key, "url": session.url, "base_url": session.base_url}
    assert (answer.status_code, answer.json()) == (201, told)
    with openai.OpenAI(base_url=told["base_url"], api_key=told["key"]) as client:
        assert client.chat.completions.create(model="m", messages=HI).choices[0].message.content == "hello"
    assert httpx.post(f"{served.url}/sessions", headers={"authorization": f"Bearer {session.key}"}).status_code == 401
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


# The server


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address of the machine")
def test_only_this_machine_can_connect(gateway):
    port = gateway.port
    with socket.create_connection(("127.0.0.1", port)):
        pass
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.2", port))  # free, so nothing listens on every address


def test_a_gateway_leaves_signals_alone_and_closes_with_sessions_open():
    def handlers():
        return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    async def opened_and_closed():
        before = handlers()
        served = Gateway()
        await served.start()
        assert handlers() == before
        engine = Scripted(held=True)
        session = served.open(engine, Letters(), RUN)
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
        async with client:
            asked = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
            while not engine.waiting:
                await asyncio.sleep(0)
            await served.close()
            await served.close()
            with pytest.raises(openai.ConflictError):
                await asked
        assert isinstance(session.outcome, Failed)
        assert engine.cancelled == 1
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", served.port)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(opened_and_closed()) == []


def test_a_port_that_is_taken_is_named(gateway, run):
    other = Gateway(port=gateway.port)
    with pytest.raises(UserError, match=rf"gateway\.port = {gateway.port}"):
        run(other.start())
    run(other.close())


@pytest.mark.parametrize(("name", "value"), [("sampling", "mine"), ("port", -1), ("port", 65536), ("beat_seconds", 0)])
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ConfigError, match=rf"gateway\.{name} = {value!r}"):
        Gateway(**{name: value})
