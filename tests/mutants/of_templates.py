"""Bugs in what chat templates add to conversations, and in what is trained on of them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/agents/chat/prompts.py",
        ("tests/agents/chat/test_real_templates.py",),
        (
            "the end of the last turn is kept where the template writes another",
            "and last in renderer.structural:",
            "and last in ():",
        ),
        (
            "only the first special token closes a reply",
            "    return special[:count]",
            "    return special[:1]",
        ),
    ),
    *planted(
        "areal_x/hf/chat_form.py",
        ("tests/agents/chat/test_real_templates.py",),
        (
            "reasoning is given under the commonest key whatever the template reads",
            "made[self.reasoning] = thought",
            'made["reasoning_content"] = thought',
        ),
        ("a message that the template leaves out is no error", "                return role\n", "                continue\n"),
        (
            "a text within a sequence begins like the first of one",
            "    anchor = _anchor(tokenizer)",
            "    anchor = None",
        ),
    ),
    *planted(
        "areal_x/agents/chat/notations.py",
        ("tests/agents/chat/test_real_templates.py",),
        ("numbers in XML stay texts", "        return json.loads(text)", "        return text"),
    ),
    *planted(
        "areal_x/agents/chat/harmony.py",
        ("tests/agents/chat/test_real_templates.py",),
        ("harmony's analysis is content", 'named[1] == "analysis"', 'named[1] == "thought"'),
    ),
    *planted(
        "areal_x/workflows/turns.py",
        ("tests/workflows/test_real_conversations.py",),
        (
            "a turn whose end the next message writes is trained on without it",
            "    return turn + end",
            "    return turn",
        ),
        (
            "the context is what the template writes later, and not the prompt",
            "        return opened or whole[:start], whole[start:]\n    if THINK",
            "        return whole[:start], whole[start:]\n    if THINK",
        ),
    ),
    *planted(
        "areal_x/hf/chat_form.py",
        ("tests/workflows/test_real_conversations.py",),
        (
            "arguments in JSON text are given to templates as text",
            "            arguments = json.loads(arguments)",
            "            pass",
        ),
    ),
]
