"""
Post-training end to end, on a CPU: two domains, three efforts, six experts, one student.

    python -m lab.bench post                  all of it, in the folder out/post
    python -m lab.bench post start sft        only these stages

    start      a small K3 with random weights whose tokenizer has a token for each tag, and
               conversations: worked problems of tasks/, each at a length of thought by chance
    sft        learn from them
    experts    rl for each task and effort: max first, high from it, low from that
    student    distill the six into one model
    others     at equal updates: rl without the mask and without (log ρ)², both at λ = 0.5
    table      what every model answers of 200 held-out problems, and how long it thinks

A stage that is finished is not done again, and one that was interrupted goes on. Every run can be
made alone, too: its command is printed before it begins.
"""
import json
import random
import re
from dataclasses import asdict
from pathlib import Path

import torch

import checkpoint
import cli
import post
import tasks
from data import chat, tokenizer
from model import K3, K3Config
from parallel import Ranks

OUT = Path("out/post")
DOMAINS = ("arithmetic", "brackets")
SIZES = dict(n_layer=4, n_embd=96, n_head=4, mla_every=2, num_experts=8, num_experts_per_token=2,
             moe_intermediate_size=32, routed_expert_hidden_size=64, intermediate_size=256)
CONVERSATIONS = 40_000
SFT = ["--steps=1200", "--context=256", "--batch_size=10", "--val_fraction=0.005", "--lr=4e-3",
       "--eval_every=200", "--log_every=20"]
RL = ["--steps=100", "--max_new_tokens=96"]


# --------------------------------------------------------------------------------------------------
# What there is to start from

def symbols():
    """Bytes, and a token for each of the template's words: an answer's tags take 16 tokens."""
    words = [chat.EFFORT.format(effort) for effort in chat.EFFORTS]
    words += ['message role="user"', 'message role="assistant"', "message", "think", "response",
              'message role="system" type="thinking-effort"']
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    texts = [*(bytes([b]) for b in range(256)), *(word.encode() for word in words)]
    ranks = {text: i for i, text in enumerate(texts)}
    enc = tokenizer.build("symbols", rf"{pattern}|[\s\S]", ranks, {tokenizer.END: len(ranks)})
    return tokenizer.with_special(enc, chat.CONTROL)


def start():
    enc, folder = symbols(), OUT / "start"
    folder.mkdir(parents=True, exist_ok=True)
    config = K3Config(vocab_size=enc.n_vocab, **SIZES)
    torch.manual_seed(1)
    model = K3(config)
    checkpoint.save_checkpoint(folder, 0, dict(
        model=model.state_dict(), optimizer={}, step=0, config=asdict(config), settings={}, data={},
        tokenizer=tokenizer.to_dict(enc)))
    print(f"{model.num_params():,} parameters, {model.num_active_params():,} active")
    rng, lines = random.Random(1), []
    for i in range(CONVERSATIONS):
        task = tasks.load(DOMAINS[i % len(DOMAINS)])
        problem = tasks.find_problem(task, False, f"sft {i}")
        thought, answer = task.solve(problem, rng)
        messages = [{"role": "user", "content": problem},
                    {"role": "assistant", "reasoning_content": thought, "content": answer}]
        if rng.random() < 0.5:                             # of any effort: it means nothing yet
            messages.insert(0, chat.effort_message(rng.choice(chat.EFFORTS)))
        lines.append(json.dumps({"messages": messages}) + "\n")
    (OUT / "sft.jsonl").write_text("".join(lines))


# --------------------------------------------------------------------------------------------------
# Runs

def run(verb, name, origin, *settings):
    """post.py in this process, unless it is done."""
    folder = OUT / name
    there = checkpoint.checkpoints(folder)
    if there:
        content = checkpoint.load_checkpoint(folder)
        if content["step"] == content["settings"]["steps"]:
            return
        words = [verb, "--resume", f"--out_dir={folder}"]
    else:
        words = [verb, f"--from={OUT / origin}", f"--out_dir={folder}", *settings]
    print(f"\npython post.py {' '.join(words)}")
    post.learn([*words, "--device=cpu"], Ranks())


def sft():
    run("sft", "sft", "start", f"--data={OUT / 'sft.jsonl'}", *SFT)


def experts():
    for task in DOMAINS:
        origin = "sft"
        for effort in ("max", "high", "low"):
            name = f"{task}-{effort}"
            run("rl", name, origin, f"--task={task}", f"--effort={effort}", *RL)
            origin = name


def student():
    teachers = ",".join(f"{task}:{effort}={OUT}/{task}-{effort}"
                        for task in DOMAINS for effort in chat.EFFORTS)
    run("distill", "student", "sft", f"--teachers={teachers}", *RL)


def others():
    for name, settings in (("partial", []), ("no-mask", ["--ratio_min=0.0", "--ratio_max=1e6"]),
                           ("no-square", ["--tau=0.0"])):
        run("rl", name, "sft", "--task=arithmetic", "--partial=0.5", *RL, *settings)


def table():
    print("\n200 held-out problems, the likeliest answers\n")
    print("| model | task | told | right | tokens of thought |\n|---|---|---|---|---|")
    for folder in sorted(path.parent for path in OUT.glob("*/metrics.jsonl")):
        model, enc = checkpoint.load_model(folder)
        efforts = chat.EFFORTS if folder.name == "student" else ("",)
        for task in DOMAINS:
            if folder.name.startswith(tuple(DOMAINS)) and not folder.name.startswith(task):
                continue
            for effort in efforts:
                right, thought = post.answer_held_out(model, enc, task, effort, 200, 96)
                print(f"| {folder.name} | {task} | {effort or '–'} | "
                      f"{sum(right) / len(right):.1%} | {sum(thought) / len(thought):.1f} |",
                      flush=True)


STAGES = dict(start=start, sft=sft, experts=experts, student=student, others=others, table=table)


def main(arguments):
    unknown = [name for name in arguments if name not in STAGES]
    if unknown:
        raise ValueError(f"no stage {unknown[0]}; there are: {', '.join(STAGES)}")
    for name in arguments or STAGES:
        if name != "start" or not (OUT / "sft.jsonl").exists():
            STAGES[name]()


if __name__ == "__main__":
    cli.run(main, __doc__)
