"""Bugs of teachers, judges, synthetic tasks and images in conversations."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

TEACHERS = ("tests/batching/test_teachers.py",)
JUDGE = ("tests/agents/test_judge.py",)
SYNTHESIS = ("tests/agents/test_synthesis.py",)
SEEN = ("tests/agents/chat/test_images.py",)

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/batching/teachers.py",
        TEACHERS,
        (
            "the teacher reads the student's prompt",
            "    tokens = np.concatenate([np.asarray(prompt, np.int32), trajectory.tokens[begin:]])",
            "    tokens = np.concatenate([trajectory.tokens[:1].repeat(context), trajectory.tokens[begin:]])",
        ),
        (
            "the kept tokens of the teacher's answer are those from the prompt's beginning",
            "[Kept.everything(context), Kept(kept.counts[begin:], kept.ids[before:])]",
            "[Kept.everything(context), Kept(kept.counts[begin:], kept.ids[::-1][before:])]",
        ),
        (
            "every teacher of a mixture counts whole",
            "total[i][begins[i] :] += weights[i][name] * scored[-answer:]",
            "total[i][begins[i] :] += scored[-answer:]",
        ),
    ),
    *planted(
        "areal_x/algorithms/teaching.py",
        TEACHERS,
        (
            "weights are not divided by their sum",
            "return {name: x / total for name, x in weights.items() if x > 0}",
            "return {name: x for name, x in weights.items() if x > 0}",
        ),
        (
            "an attempt is shown its own success",
            "if other is not episode and other.outcome.reward >= reward and other.trajectories:",
            "if other.outcome.reward >= reward and other.trajectories:",
        ),
    ),
    *planted(
        "areal_x/agents/judge.py",
        JUDGE,
        (
            "the first score of a reply counts",
            "score = float(found[-1])",
            "score = float(found[0])",
        ),
        (
            "an answer fills places of the rubric",
            "return PLACES.sub(lambda place: values[place[1]](), rubric)",
            "return PLACES.sub(lambda place: values[place[1]](), PLACES.sub(lambda place: values[place[1]](), rubric))",
        ),
        (
            "a judge without a verdict gives a reward of 0",
            'return Failed(f"{error}")',
            "judged = 0.0",
        ),
    ),
    *planted(
        "areal_x/agents/synthesis.py",
        SYNTHESIS,
        (
            "the untouched world is not tried",
            "others = [*proposal.unsolved, *([] if proposal.untouched else [proposal.world])]",
            "others = [*proposal.unsolved]",
        ),
        (
            "a verifier's change of the world stays for the next verdict",
            'verdicts = [names["verify"](copied(given["before"]), copied(after)) for after in given["after"]]',
            'verdicts = [names["verify"](given["before"], after) for after in given["after"]]',
        ),
    ),
    *planted(
        "areal_x/agents/chat/merging.py",
        SEEN,
        (
            "another image of the same size goes on with the trajectory of the first",
            "            and begins_with(call.images, merged.trajectory.images)\n",
            "",
        ),
    ),
    *planted(
        "areal_x/agents/chat/prompts.py",
        SEEN,
        (
            "a later prompt has the images of the whole conversation in its last part",
            "later = await images_of(renderer, whole[place + 1 :])",
            "later = await images_of(renderer, whole)",
        ),
        (
            "a reply with an image's token stands before images",
            "if images is None or renderer.shows(images, prompt.tokens):",
            "if images is None or len(prompt.tokens):",
        ),
    ),
]
