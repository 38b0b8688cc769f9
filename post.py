"""
From a trained model to one that answers, and thinks as long as it is told (report §4.1; for the
loss, Kimi K2.5, arXiv 2602.02276, eq. 1).

    python post.py sft     --from=out/NAME --data=FILE.jsonl       lines of {"messages": […]}
    python post.py rl      --from=out/NAME-sft --task=arithmetic --effort=low
    python post.py distill --from=out/NAME-sft --teachers=arithmetic:low=out/A,brackets:max=out/B

--from takes a run, a checkpoint or a folder of released weights, and --effort low, high, max or
nothing, for no budget. A task is a file in tasks/, such as arithmetic.py, which says what it holds.
All else is as in train.py: settings, torchrun, --resume --out_dir=…, Ctrl-C; --help shows them.

The three share a loss. Of answers y with N tokens in all, drawn from π_b, with ρ = π_θ/π_b:

    L = −(1/N) Σ_t [1(α ≤ ρ_t ≤ β) ρ_t A_t − τ (log ρ_t)²]

    sft      A = 1, on what others said, as if just drawn (ρ = 1): cross-entropy's gradient
    rl       A = r − r̄: reward, less its mean over the K answers to a prompt; r = −1 for an answer
             that thinks longer than its budget
    distill  A_t = clip(log π_teacher(y_t | x) − log π_θ(y_t | e, x), −R, R) (eq. 15): the student
             is told the effort e, the teacher is not

The report leaves open α, β, τ, R, K and how a budget falls; the defaults here are ours.
"""
import contextlib
import hashlib
import math
import random
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

import checkpoint
import cli
import tasks
import train
from data import chat, tokenizer
from model import K3, rows_of
from mtp import evaluating
from ops import fp32
from sizes import K3Config

TAU_B = {"low": 0.5, "high": 1.0, "max": 4.0}     # budget: so many times b_0; a run starts at max
PERCENTILE = 90                                   # b_0: of the thinking of right answers at first
# For these, train.py's defaults are for training from nothing
DEFAULTS = dict(sft=dict(steps=500, lr=2e-3, eval_every=100),
                rl=dict(steps=200, lr=3e-4, eval_every=20, log_every=1, data=""),
                distill=dict(steps=200, lr=3e-4, eval_every=20, log_every=1, data=""))


@dataclass
class Settings(train.Settings):
    verb: str = ""                # sft, rl or distill
    # sft
    val_fraction: float = 0.05    # the last part of the conversations is for validation
    # rl and distill: batch_size answers are a micro-batch, whatever their length
    task: str = ""                # rl: a file in tasks/
    effort: str = ""              # rl: low, high or max; "": no budget
    teachers: str = ""            # distill: task:effort=run, with commas
    keep_teachers: bool = True    # False: load a teacher anew whenever it is asked
    prompts: int = 16             # in work at a time
    answers: int = 8              # K, to each
    max_new_tokens: int = 128     # of an answer
    temperature: float = 1.0
    partial: float = 1.0          # λ: an update waits for this part of the answers
    ratio_min: float = 0.5        # α
    ratio_max: float = 2.0        # β
    tau: float = 0.1              # τ
    most_advantage: float = 5.0   # R
    eval_prompts: int = 200       # held-out ones in an evaluation


# What only some verbs have a use for
OF_SFT = {"data", "val_fraction", "context", "grad_accum", "eval_batches", "context_parallel"}
OF_RL, OF_DISTILL = {"task", "effort"}, {"teachers", "keep_teachers", "most_advantage"}
OF_BOTH = {"prompts", "answers", "max_new_tokens", "temperature", "partial", "ratio_min",
           "ratio_max", "tau", "eval_prompts"}
OTHERS = dict(sft=OF_RL | OF_DISTILL | OF_BOTH, rl=OF_SFT | OF_DISTILL, distill=OF_SFT | OF_RL)


# ------------------------------------------------------------------------------------------------
# the loss

def token_loss(logp, behaviour, advantage, settings):
    """
    L's sum, token by token: log-probabilities of the tokens under the model and under the one that
    they were drawn from. A token far from ρ = 1 has no pull, whatever the sign of its advantage.
    """
    log_ratio = logp - behaviour
    ratio = log_ratio.clamp(max=20).exp()         # finite, so that 0 · ratio is 0
    return settings.tau * log_ratio.square() - is_kept(ratio, settings) * ratio * advantage


def is_kept(ratio, settings):
    return (settings.ratio_min <= ratio) & (ratio <= settings.ratio_max)


def log_probabilities(logits, temperature, enc):
    """
    logits (…, vocab or more) → what tokens are drawn from, (…, vocab): in rollouts and in training
    the same, temperature and all. An answer is text: it has no tokens of images.
    """
    logits, media = fp32(logits[..., :enc.n_vocab]) / temperature, tokenizer.media_ids(enc)
    if media:
        logits = logits.index_fill(-1, torch.tensor(media, device=logits.device), -math.inf)
    return logits.log_softmax(-1)


def of_targets(logits, y, temperature, enc):
    """The log-probabilities of y (B, T), −1 taken for 0."""
    logp = log_probabilities(logits, temperature, enc)                         # (B, T, vocab)
    return logp.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def to_batch(answers, device, *numbers):
    """
    Answers, and lists of a number for each of their tokens → x, y, there, numbers (B, T). Rows are
    padded on the right, where nothing before can see it; `there` (bool) is what is no padding. y is
    −1 but for the answers' tokens, and numbers are 0.
    """
    ends = [len(a.prompt) + len(a.ids) - 1 for a in answers]
    x = torch.zeros(len(answers), max(ends), dtype=torch.int64)
    y, there = torch.full_like(x, -1), torch.zeros_like(x, dtype=torch.bool)
    spread = [torch.zeros_like(x, dtype=torch.float32) for _ in numbers]
    for row, (a, end) in enumerate(zip(answers, ends)):
        begin = len(a.prompt) - 1
        x[row, :end] = torch.tensor((a.prompt + a.ids)[:-1])
        y[row, begin:end] = torch.tensor(a.ids)
        there[row, :end] = True
        for to, values in zip(spread, numbers):
            to[row, begin:end] = torch.tensor(values[row])
    return [tensor.to(device) for tensor in (x, y, there, *spread)]


# ------------------------------------------------------------------------------------------------
# rollouts

@dataclass
class Answer:
    prompt: list                  # ids, up to where the assistant begins to think
    key: tuple                    # of its random numbers: they depend on nothing else
    ids: list = field(default_factory=list)
    logp: list = field(default_factory=list)      # of each, under the policy that drew it
    done: bool = False


@dataclass
class Group:
    """The answers to one prompt."""
    task: str
    problem: str
    effort: str                   # that the model is told; "": none
    answers: list

    def is_whole(self):
        return all(a.done for a in self.answers)


@torch.no_grad()
def generate(model, answers, enc, limit, temperature=1.0, enough=None):
    """
    Answers grow, in one batch, until `enough` of them (all) are done: by <|end_of_msg|>, or by
    having `limit` tokens. A row that is done leaves the batch. An answer that was begun before goes
    on; what there is of it is read again, by the weights of now. temperature 0: always the
    likeliest token.
    """
    rows, end = [a for a in answers if not a.done], enc._special_tokens[chat.END]
    left = len(rows) - (len(rows) if enough is None else enough)
    if not rows:
        return
    chances = [np.random.default_rng(a.key).random(limit, np.float32) for a in rows]
    with evaluating(model):                       # the router's bias is for training to move
        logits, cache = model.read([a.prompt + a.ids for a in rows])
    while True:
        logp = log_probabilities(logits[:, -1], temperature or 1, enc)         # (rows, vocab)
        chance = [of_row[len(a.ids)] for a, of_row in zip(rows, chances)]
        drawn = draw(logp, torch.tensor(np.array(chance), device=logp.device), temperature)
        values = logp.gather(1, drawn)                                         # (rows, 1)
        for a, token, value in zip(rows, drawn[:, 0].tolist(), values[:, 0].tolist()):
            a.ids.append(token)
            a.logp.append(value)
            a.done = token == end or len(a.ids) == limit
        going = [i for i, a in enumerate(rows) if not a.done]
        if len(going) <= left:
            return
        if len(going) < len(rows):
            rows, chances = [rows[i] for i in going], [chances[i] for i in going]
            drawn, cache = drawn[going], rows_of(cache, going)
        with evaluating(model):
            logits, _ = model(drawn, cache=cache, last_only=True)


def draw(logp, chance, temperature):
    """logp (n, vocab), chance (n) in [0, 1) → (n, 1): the token in whose share of 1 it lies."""
    if temperature == 0:
        return logp.argmax(-1, keepdim=True)
    total = logp.exp().cumsum(-1)
    place = chance.to(total.dtype).unsqueeze(1) * total[:, -1:]
    return torch.searchsorted(total, place, right=True).clamp_(max=total.shape[1] - 1)


def thinking(ids, enc):
    """How many tokens of an answer are thought: all of them, if it never ends to think."""
    close = enc._special_tokens[chat.CLOSE]
    return ids.index(close) if close in ids else len(ids)


# ------------------------------------------------------------------------------------------------
# tasks: what is asked, and what an answer is worth

def ask(problem, effort, enc):
    """→ ids of the prompt."""
    messages = [chat.effort_message(effort)] if effort else []
    return chat.render([*messages, {"role": "user", "content": problem}], enc, answer=True)[0]


def new_group(name, problem, effort, enc, keys):
    prompt = ask(problem, effort, enc)
    return Group(name, problem, effort, [Answer(list(prompt), key) for key in keys])


def is_right(task, problem, ids, enc):
    """The task's reward; 0 for an answer that is cut short or breaks the template."""
    message = chat.read_answer(ids, enc)
    return float(task.reward(problem, message["content"])) if message else 0.0


def answer_held_out(model, enc, name, effort, count, limit, temperature=0.0, rank=0, ranks=1):
    """Held-out problems, answered by a model → what is right and how long it thought, lists."""
    task = tasks.load(name)
    groups = [new_group(name, tasks.find_problem(task, True, f"held out {i}"), effort, enc, [(i,)])
              for i in range(rank, count, ranks)]
    answers = [group.answers[0] for group in groups]
    generate(model, answers, enc, limit, temperature)
    return ([is_right(task, g.problem, a.ids, enc) for g, a in zip(groups, answers)],
            [thinking(a.ids, enc) for a in answers])


# ------------------------------------------------------------------------------------------------
# runs: train.py's, but for what they learn from

class Run(train.Run):

    def __init__(self, verb, arguments, ranks):
        self.ranks = ranks
        given, out_dir = read_arguments(verb, arguments)
        saved = checkpoint.load_checkpoint(out_dir) if given.get("resume") else None
        model = None
        if saved:
            if saved["settings"].get("verb") != verb:
                raise ValueError(f"the run in {out_dir} is none of post.py {verb}")
            given = train.resumed_settings(given, saved, out_dir, TYPES)
            self.config = K3Config(**{name: given[name] for name in saved["config"]})
            self.enc = tokenizer.from_dict(saved["tokenizer"])
        else:
            model, self.enc = load_start(given)
            self.config = model.config
        self.settings = make_settings({**given, "verb": verb, "out_dir": out_dir})
        chat.control_ids(self.enc)                # fail now if there are none
        self.learn_from(saved)
        self.set_up(model, saved)

    def what_now(self):
        return f"; talk to it with: python sample.py --chat --out_dir={self.out_dir}"


class Source:
    """What train.py wants to know of a run's data."""

    def __init__(self, enc, words, identity):
        self.enc, self.words, self.identity = enc, words, identity

    def check(self, settings, config, saved):
        if saved and saved["data"] != self.identity:
            raise ValueError(f"{settings.data} is not what {settings.out_dir} was trained on; give "
                             "the same file, or start a new run")

    def told(self, settings):
        return self.words

    def changed(self):
        return False                              # all of it is in memory

    def close(self):
        pass


# ------------------------------------------------------------------------------------------------
# sft

class Sft(Run):

    def learn_from(self, saved):
        s, ranks = self.settings, self.ranks
        self.data = Conversations(self.enc, s)
        self.batches = PackedBatches(s, self.data, ranks)
        self.log = SftLog(s, speaks=ranks.rank == 0)

    @torch.no_grad()
    def evaluate(self):
        """Mean loss in nats per token of the assistant's, on the last conversations."""
        s, ranks = self.settings, self.ranks
        rows = chat.pack(self.data.parts["val"], s.context + 1)[:s.eval_batches * s.batch_size]
        total = count = 0.0
        self.model.eval()
        for i in range(0, len(rows), s.batch_size):
            ours = rows[i:i + s.batch_size][ranks.data_rank::ranks.data_ranks]
            # a rank without a row computes along: others may need its experts
            x, y = (ranks.stretch(part).to(self.device)
                    for part in tensors(ours or rows[:1], s.context))
            targets = (y != -1).sum().item() if ours else 0
            with self.autocast:
                loss = self.model(x, y)[1].item()
            total, count = total + (loss * targets if targets else 0), count + targets
        self.model.train()
        total, count = ranks.sum(total, count)
        return total / count


def tensors(rows, context):
    return map(torch.from_numpy, chat.inputs_and_targets(rows, context))


class Conversations(Source):
    """Those of a .jsonl file: .parts has (ids, what the assistant says) of each, by split."""

    def __init__(self, enc, settings):
        path, context = Path(settings.data).expanduser(), settings.context
        found = chat.read_conversations(path)
        held_out = max(1, round(settings.val_fraction * len(found)))
        if len(found) < 2:
            raise ValueError(f"{path}: {len(found)} conversations; expected some to train on and "
                             "one more for validation")
        rendered = [chat.render(messages, enc) for messages in found]
        for number, (ids, _) in enumerate(rendered, 1):
            if len(ids) > context + 1:
                raise ValueError(f"context = {context}: conversation {number} of {path} has "
                                 f"{len(ids)} tokens; give --context={len(ids) - 1}, or leave it "
                                 "out of the file")
        self.parts = dict(train=rendered[:-held_out], val=rendered[-held_out:])
        sizes = {split: sum(len(ids) for ids, _ in part) for split, part in self.parts.items()}
        words = f"{path}: {len(found):,} conversations, {sum(sizes.values()):,} tokens"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        super().__init__(enc, words, dict(sha256=digest, **{f"{split}_tokens": size
                                                            for split, size in sizes.items()}))


class PackedBatches(train.Batches):

    def __init__(self, settings, data, ranks):
        super().__init__(settings, data, ranks)
        self.packed, self.epochs = [], 0

    def make(self, step, micro):
        """A step's rows follow those of the step before; every epoch has an order of its own."""
        s, size = self.settings, self.settings.batch_size
        begin, end = step * s.grad_accum * size, (step + 1) * s.grad_accum * size
        while len(self.packed) < end:
            self.packed += chat.pack(self.data.parts["train"], s.context + 1,
                                     (s.seed, self.epochs))
            self.epochs += 1
        rows = self.packed[begin + micro * size:][:size]
        x, y = map(self.ranks.part, tensors(rows, s.context))
        said = sum(sum(conversation[1]) for row in self.packed[begin:end] for conversation in row)
        micros = len(self.ranks.micro_batches(s.grad_accum))
        # a mean over all that is said in the step, however it is shared out
        return x, y, None, (y != -1).sum().item() / said * micros * self.ranks.world_size


class SftLog(train.Log):

    def evaluation(self, run, loss):
        figures = dict(step=run.step, seconds=run.seconds, val_loss=loss)
        self.write(f"step {run.step:>6}  val {loss:.4f} nats per token of the assistant's  "
                   f"({run.seconds:.0f} s)", figures)


# ------------------------------------------------------------------------------------------------
# rl and distill

class OnPolicy(Run):
    """What an update learns from is drawn from the model itself."""

    def learn_from(self, saved):
        s, ranks = self.settings, self.ranks
        if s.prompts < ranks.world_size:
            raise ValueError(f"prompts = {s.prompts}: expected at least one for each of "
                             f"{ranks.world_size} processes")
        self.teachers, self.loaded = read_teachers(s.teachers) if s.teachers else {}, {}
        self.asked = list(self.teachers) or [(s.task, "")]       # (task, effort that is told)
        self.tasks = {name: tasks.load(name) for name, _ in self.asked}
        for task in self.tasks.values():          # fail now, not at the first evaluation
            tasks.find_problem(task, True, "held out 0")
        self.data = self.batches = Source(self.enc, f"tasks {', '.join(self.tasks)}", {})
        self.log = OnPolicyLog(s, speaks=ranks.rank == 0)
        groups = saved["groups"][ranks.rank::ranks.world_size] if saved else []
        self.groups = [Group(**{**group, "answers": [Answer(**a) for a in group["answers"]]})
                       for group in groups]
        self.budgets = saved["budgets"] if saved else {}         # {kind: b_0}

    def also_saved(self):
        groups = [asdict(group) for group in self.groups]
        everywhere = self.ranks.gather(groups) if self.ranks.world_size > 1 else [groups]
        return dict(groups=sum(everywhere or [], []), budgets=self.budgets)

    def gradients(self):
        ranks, size = self.ranks, self.settings.batch_size
        answers, values, figures = self.experience()
        tokens, = ranks.sum(sum(len(a.ids) for a in answers))
        order = sorted(range(len(answers)), key=lambda i: len(answers[i].prompt + answers[i].ids))
        total = moved = masked = 0.0
        for begin in range(0, len(order), size):
            part = order[begin:begin + size]
            later = ranks.world_size > 1 and begin + size < len(order)
            with self.wrapped.no_sync() if later else contextlib.nullcontext():
                loss, x, y, log_ratio = self.loss([answers[i] for i in part],
                                                  [values[i] for i in part])
                loss = loss * ranks.world_size / tokens
                loss.backward()
            total += loss.item()
            moved += log_ratio.abs().sum().item()
            masked += (~is_kept(log_ratio.exp(), self.settings)).sum().item()
        *sums, moved, masked, count = ranks.sum(*figures.values(), moved, masked, len(answers))
        self.figures = {name: value / count for name, value in zip(figures, sums)}
        self.figures |= dict(log_ratio=moved / tokens, masked=masked / tokens, answers=count)
        self.last = x, y, None
        return torch.tensor([[total, 0.0]], device=self.device)  # MTP is not trained here

    def batch(self, step, micro):
        """For the message about a loss that is not finite."""
        return *self.last, 1

    def loss(self, answers, values):
        """→ L's sum over a micro-batch, its x and y, and log ρ of all tokens of answers, flat."""
        s = self.settings
        x, y, there, behaviour, value = to_batch(answers, self.device,
                                                 [a.logp for a in answers], values)
        with self.autocast:
            logits = self.wrapped(x, counted=there)[0]
        logp, said = of_targets(logits, y, s.temperature, self.enc), y != -1
        if self.teachers:
            value = (value - logp.detach()).clamp(-s.most_advantage, s.most_advantage)
        return ((token_loss(logp, behaviour, value, s) * said).sum(), x, y,
                (logp.detach() - behaviour)[said])

    def experience(self):
        """
        → answers to the prompts whose answers are all done; for each a number per token: rl's
        advantage, or the teacher's log-probability; and sums of figures over them.
        """
        s, ranks = self.settings, self.ranks
        if s.effort and not self.budgets:         # before the first update
            self.budgets = self.first_lengths()
        for slot in range(ranks.rank, s.prompts, ranks.world_size)[len(self.groups):]:
            self.groups.append(self.new_group(self.step + 1, slot, s.answers))
        whole = []
        while not whole:
            going = [a for group in self.groups for a in group.answers if not a.done]
            self.generate(going, enough=math.ceil(s.partial * len(going)))
            whole = [group for group in self.groups if group.is_whole()]
        self.groups = [group for group in self.groups if not group.is_whole()]
        figures, answers, values = dict(reward=0.0, right=0.0, thinking=0.0), [], []
        for group in whole:
            task, budget = self.tasks[group.task], self.budget(group)
            right = [is_right(task, group.problem, a.ids, self.enc) for a in group.answers]
            thought = [thinking(a.ids, self.enc) for a in group.answers]
            rewards = [r if T <= budget else -1.0 for r, T in zip(right, thought)]
            mean = sum(rewards) / len(rewards)
            answers += group.answers
            values += [[r - mean] * len(a.ids) for r, a in zip(rewards, group.answers)]
            for name, new in zip(figures, (rewards, right, thought)):
                figures[name] += sum(new)
        return answers, self.judge(whole) if self.teachers else values, figures

    def new_group(self, step, slot, answers):
        """A prompt for training: its key says all that is random about it."""
        key = self.settings.seed, step, slot
        name, effort = random.Random(f"asked {key}").choice(self.asked)
        problem = tasks.find_problem(self.tasks[name], False, key)
        return new_group(name, problem, effort, self.enc, [(*key, k) for k in range(answers)])

    def generate(self, answers, enough=None):
        with self.autocast:
            generate(self.model, answers, self.enc, self.settings.max_new_tokens,
                     self.settings.temperature, enough)

    # ---- rl: budgets by effort

    def budget(self, group):
        """The most tokens of thought, τ_b · b_0: from max's in the first half of a run down."""
        if not self.budgets:
            return math.inf
        fallen = min(1.0, 2 * self.step / self.settings.steps)
        tau_b = TAU_B["max"] ** (1 - fallen) * TAU_B[self.settings.effort] ** fallen
        return tau_b * self.budgets.get(tasks.kind(self.tasks[group.task], group.problem),
                                        max(self.budgets.values()))

    def first_lengths(self):
        """b_0 by kind of problem: a percentile of what the model thinks when it is right."""
        groups = [self.new_group(0, slot, 1) for slot in range(4 * self.settings.eval_prompts)]
        self.generate([group.answers[0] for group in groups])
        lengths = {}
        for group in groups:
            task, ids = self.tasks[group.task], group.answers[0].ids
            if is_right(task, group.problem, ids, self.enc) > 0:
                kind = tasks.kind(task, group.problem)
                lengths.setdefault(kind, []).append(thinking(ids, self.enc))
        if not lengths:
            raise ValueError(f"{self.settings.init_from} answers none of {len(groups)} problems "
                             "right, so there is no length to start from; sft longer, or leave "
                             "--effort out")
        return {kind: float(np.percentile(found, PERCENTILE)) for kind, found in lengths.items()}

    # ---- distill: what the teachers say of the student's answers

    @torch.no_grad()
    def judge(self, groups):
        """→ for each answer the teacher's log-probabilities of its tokens."""
        s, values = self.settings, {}
        for asked, path in self.teachers.items():
            mine = [group for group in groups if (group.task, group.effort) == asked]
            answers = [Answer(ask(group.problem, "", self.enc), a.key, a.ids)
                       for group in mine for a in group.answers]
            for begin in range(0, len(answers), s.batch_size):
                rows = answers[begin:begin + s.batch_size]
                x, y, _ = to_batch(rows, self.device)
                with self.autocast:
                    logits = self.teacher(path)(x)[0]
                logp = of_targets(logits, y, s.temperature, self.enc)
                for a, row, said in zip(rows, logp, y != -1):
                    values[a.key] = row[said].tolist()
            if not s.keep_teachers:
                self.loaded.clear()
        return [values[a.key] for group in groups for a in group.answers]

    def teacher(self, path):
        if path not in self.loaded:
            model, enc = load_start(dict(init_from=path))
            theirs, ours = (tokenizer.to_dict(e) for e in (enc, self.enc))
            if any(theirs[key] != ours[key] for key in ("pattern", "ranks", "special")):
                raise ValueError(f"the teacher in {path} has another tokenizer than the student; "
                                 "give one that comes from the same model")
            self.loaded[path] = model.to(self.device).eval()
        return self.loaded[path]

    def evaluate(self):
        """Held-out problems, the likeliest answers → {figure: value}."""
        s, ranks, found = self.settings, self.ranks, {}
        for name, effort in self.asked:
            with self.autocast:
                right, thought = answer_held_out(self.model, self.enc, name, effort, s.eval_prompts,
                                                 s.max_new_tokens, 0, ranks.rank, ranks.world_size)
            right, thought = ranks.sum(sum(right), sum(thought))
            label = f"{name}:{effort}" if effort else name
            found |= {f"right {label}": right / s.eval_prompts,
                      f"thinking {label}": thought / s.eval_prompts}
        return found


class OnPolicyLog(train.Log):

    def training(self, run, loss, lr, norm, mtp_loss):
        s, f = run.settings, run.figures
        seconds = (run.seconds - self.last_seconds) / (run.step - self.last_step)
        figures = dict(step=run.step, loss=loss, lr=lr, grad_norm=norm, seconds=run.seconds,
                       max_violation=self.violation, dead_experts=self.dead, **f)
        self.write(f"step {run.step:>6}/{s.steps}  reward {f['reward']:.3f}  right {f['right']:.3f}"
                   f"  thinking {f['thinking']:.1f}  |log ρ| {f['log_ratio']:.4f}  masked "
                   f"{f['masked']:.1%}  {f['answers']:.0f} answers in {seconds:.1f} s", figures,
                   live=self.live)
        self.begin(run)

    def evaluation(self, run, found):
        pairs = [name.partition(" ")[2] for name in found if name.startswith("right ")]
        shown = ", ".join(f"{pair} {found[f'right {pair}']:.1%} right with "
                          f"{found[f'thinking {pair}']:.1f} tokens of thought" for pair in pairs)
        self.write(f"step {run.step:>6}  held out: {shown}  ({run.seconds:.0f} s)",
                   dict(step=run.step, seconds=run.seconds, **found))


# ------------------------------------------------------------------------------------------------
# the command

TYPES = {f.name: f.type for f in (*fields(Settings), *fields(K3Config))}
# What a model may be started with that its checkpoint says otherwise
FREE = ("qat", "balance", "router_bias_ema")


def read_arguments(verb, arguments):
    """→ {name: value} of settings, the run's folder. Errors: ValueError."""
    words = [re.sub("^--?from(?==|$)", "--init_from", word) for word in arguments]
    given, _ = cli.read_settings(words, TYPES)
    for name in ("out_dir", "init_from"):
        given[name] = str(Path(given[name]).expanduser()) if given.get(name) else ""
    start, resume = given["init_from"], given.get("resume")
    if not start and not resume:
        raise ValueError("--from=RUN is missing: a run, a checkpoint or a folder of released "
                         "weights to start from")
    wrong = given.keys() & OTHERS[verb]
    if wrong:
        raise ValueError(f"--{min(wrong)} is not for {verb}; --help says what is")
    if verb != "sft" and given.get("expert_parallel", 1) > 1:
        raise ValueError(f"expert_parallel: each process of {verb} draws answers at its own pace, "
                         "so experts cannot be shared out; leave it out")
    of_task = "-".join(given[name] for name in ("task", "effort") if given.get(name))
    folder = Path(start).parent if start.endswith(".pt") else Path(start)
    out_dir = given["out_dir"] or f"out/{folder.name}-{of_task or verb}"
    if resume:
        given = {name: value for name, value in given.items() if value != ""}
    return {**({} if resume else DEFAULTS[verb]), **given}, out_dir


def make_settings(given):
    names = {f.name for f in fields(Settings)}
    s = Settings(**{name: value for name, value in given.items() if name in names})
    needed = dict(sft="data", rl="task", distill="teachers")[s.verb]
    if needed not in given:
        raise ValueError(f"{s.verb} needs --{needed}=…; --help says what it is")
    counts = ("prompts", "answers", "max_new_tokens", "eval_prompts")
    train.check(s, [
        *((name, getattr(s, name) >= 1, "at least 1") for name in counts),
        ("answers", s.verb != "rl" or s.answers > 1, "2 or more: an advantage is a difference"),
        ("effort", s.effort in ("", *chat.EFFORTS), "low, high, max, or nothing for no budget"),
        ("val_fraction", 0 < s.val_fraction < 1, "a number between 0 and 1"),
        ("temperature", s.temperature > 0, "more than 0"),
        ("partial", 0 < s.partial <= 1, "0 < partial ≤ 1"),
        ("ratio_min", 0 <= s.ratio_min < 1, "0 ≤ ratio_min < 1"),
        ("ratio_max", s.ratio_max > 1, "more than 1"),
        ("tau", s.tau >= 0, "at least 0"),
        ("most_advantage", s.most_advantage > 0, "more than 0"),
        ("context_stages", not s.context_stages, "none in post.py")])
    return s


def load_start(given):
    """A run, a checkpoint or a folder of released weights → K3 in fp32, its tokenizer."""
    path, changes = given["init_from"], {name: given[name] for name in FREE if name in given}
    sizes = given.keys() & {f.name for f in fields(K3Config)} - set(FREE)
    if sizes:
        raise ValueError(f"--{min(sizes)}: sizes are those of {path}; leave it out")
    if (Path(path) / "config.json").is_file():
        model = K3.from_pretrained(path, torch.float32, **changes)
    else:
        content = checkpoint.load_checkpoint(path)
        model = K3(K3Config(**{**content["config"], **changes}))
        checkpoint.load_weights(model, content["model"])
        model.tokenizer = tokenizer.from_dict(content["tokenizer"])
    if model.tokenizer is None:
        raise ValueError(f"no tiktoken.model in {path}; put the file that belongs to the weights "
                         "there")
    return model, model.tokenizer


def read_teachers(text):
    """ "arithmetic:low=out/a,…" → {(task, effort): path}. Errors: ValueError."""
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\w+):(low|high|max)=(.+)", part.strip())
        if not match:
            raise ValueError(f"--teachers: expected task:effort=run,… with an effort of low, high "
                             f"or max, got {part!r}")
        found[match[1], match[2]] = str(Path(match[3]).expanduser())
    return found


VERBS = dict(sft=Sft, rl=OnPolicy, distill=OnPolicy)


def learn(arguments, ranks):
    if not arguments or arguments[0] not in VERBS:
        raise ValueError("expected: python post.py sft | rl | distill --from=RUN …")
    verb, *rest = arguments
    with VERBS[verb](verb, rest, ranks) as run:
        train.loop(run)


if __name__ == "__main__":
    cli.run(lambda arguments: train.main(arguments, learn),
            __doc__.strip() + cli.describe(Settings, train.Settings, K3Config))
