"""
MoonViT-V2, from pixels to the same stream as text (report §2.4).

    preprocess    an image → patches of p × p pixels, in a grid of h × w
    one_image     patches → features, the definition: one image, cos and sin written out
    forward       the same for many images at once

An image is written as a mark, its size, one pad per feature and a closing mark. Where the pads
stand, K3 reads features instead of embeddings; no other line of the model knows about images.

    x_p = W_patch vec(patch_p) + P_p             P: a learned table, bilinear at other sizes
    x ← x + W_o attention(n0(x))                 over all patches of one image, both ways
    x ← x + W_fc1 gelu(W_fc0 n1(x))              gelu in its tanh form
    z = four neighbouring n_f(x), side by side   2 × 2 patches become one feature
    y = post_norm(W_2 gelu(W_0 z))               the projector; gelu in its exact form

n0, n1, n_f and post_norm are RMSNorm. There is no bias, no class token and no AttnRes in here.
A clip of up to four frames is one image with a third axis. The report speaks of separate passes
over space and time; the released weights have tensors for one joint pass only, and so has this.
"""
import math

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from ops import RMSNorm, fp32

FRAMES = 4  # of a clip, at most
EPS = torch.finfo(torch.float32).eps  # of the tower's norms, in every dtype
WHITE, GREY, SQUARE = 255, 180, 8  # the chessboard, white at the top left


# --------------------------------------------------------------------------------------------------
# From an image to patches

def preprocess(image, patch=14, patch_limit=65536, side_limit=512):
    """
    image (H, W), (H, W, 3) or (H, W, 4) uint8: grey, RGB or RGBA → patches (h·w, 3·p²) float32 in
    [−1, 1], and their grid (h, w). An image with too many patches, or too many along one side, is
    shrunk; none is enlarged. Errors: ValueError.
    """
    pixels, grid = cut(shrink(image, patch, patch_limit, side_limit), patch)
    return normalise(torch.from_numpy(pixels)), grid


def shrink(image, patch=14, patch_limit=65536, side_limit=512):
    """image uint8, as preprocess takes it → (H', W', 3) uint8, within both limits."""
    image = np.asarray(image)
    good = image.ndim == 2 or image.ndim == 3 and image.shape[2] in (3, 4)
    if image.dtype != np.uint8 or not good or not image.size:
        raise ValueError(f"image: expected (H, W), (H, W, 3) or (H, W, 4) uint8, got "
                         f"{image.shape} {image.dtype}")
    H, W = image.shape[:2]
    in_patches = max(1, H // patch) * max(1, W // patch)
    scale = min(1, math.sqrt(patch_limit / in_patches),
                side_limit * patch / W, side_limit * patch / H)
    height, width = (min(max(1, int(side * scale)), side_limit * patch) for side in (H, W))
    if (height, width) != (H, W):
        from PIL import Image  # needed only here, where an image is too large
        smaller = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
        image = np.asarray(smaller)
    if image.ndim == 2:
        return image[:, :, None].repeat(3, axis=2)
    return image if image.shape[2] == 3 else over_chessboard(image)


def over_chessboard(image):
    """(H, W, 4) uint8 → (H, W, 3): blended over white and grey squares as its alpha says."""
    row, column = (np.arange(side) // SQUARE for side in image.shape[:2])
    white = (row[:, None] + column) % 2 == 0
    board = np.where(white, WHITE, GREY)[:, :, None]
    alpha = image[:, :, 3:] / 255
    blend = alpha * image[:, :, :3] + (1 - alpha) * board
    return blend.astype(np.uint8)  # cut off, not rounded


def cut(image, patch=14):
    """
    (H, W, 3) uint8 → patches (h·w, 3·p²) uint8 and their grid (h, w), both even. A patch lists its
    numbers by channel, row, column; patches stand row by row. What is missing on the right and at
    the bottom is filled with 0 here, before normalise, so it ends as −1.
    """
    h, w = (2 * math.ceil(side / (2 * patch)) for side in image.shape[:2])
    full = np.zeros((h * patch, w * patch, 3), np.uint8)
    full[:image.shape[0], :image.shape[1]] = image
    cells = full.reshape(h, patch, w, patch, 3).transpose(0, 2, 4, 1, 3)  # (h, w, 3, p, p)
    return cells.reshape(h * w, 3 * patch * patch), (h, w)


def normalise(patches):
    """uint8 → float32 in [−1, 1]. Data sets hold uint8; the tower calls this on what it gets."""
    return (patches.float() / 255 - 0.5) * 2


# --------------------------------------------------------------------------------------------------
# The tower

class VisionTower(nn.Module):
    """
    patches (L, 3·p²), as preprocess gives them or still uint8, and a list of grids, one for each
    image (h, w) or clip (t, h, w) → features (N, d), N = Σ h/2 · w/2.

    Patches stand image after image, in a clip frame after frame, in a frame row by row; so do the
    features, of which a clip has as many as one image.
    Errors: ValueError for odd grids, more than four frames, a number of patches that does not fit.
    """

    def __init__(self, config):
        super().__init__()
        c, D = config, config.vit_width
        self.heads, self.patch = c.vit_heads, c.vit_patch
        self.patch_map = nn.Linear(3 * c.vit_patch ** 2, D, bias=False)
        self.table = nn.Parameter(torch.zeros(c.vit_table, c.vit_table, D))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.vit_layers))
        self.norm = RMSNorm(D, EPS)
        self.proj0 = nn.Linear(4 * D, 4 * D, bias=False)
        self.proj2 = nn.Linear(4 * D, c.n_embd, bias=False)
        self.post_norm = RMSNorm(c.n_embd, 1e-5)

    def one_image(self, patches, grid):
        """The definition, for one image or clip: patches (t·h·w, 3·p²) → (h/2 · w/2, d)."""
        t, h, w = (1, *grid)[-3:]
        n, D = t * h * w, self.table.shape[-1]
        x = self.patch_map(patches).view(t, h * w, D) + self.position(h, w)
        if t > 1:
            x = x + self.time(t)[:, None]
        x = x.view(n, D)

        row = torch.arange(h).repeat_interleave(w).repeat(t).double()  # (n)
        column = torch.arange(w).repeat(t * h).double()  # (n)
        for block in self.blocks:
            qkv = block.wqkv(block.norm0(x)).view(n, 3, self.heads, -1)
            q, k, v = qkv.unbind(1)  # (n, H, K)
            K = q.shape[-1]
            turned = []
            for y in (q, k):
                numbers = []
                for i in range(K // 4):
                    omega = 10000 ** (-4 * i / K)
                    for pair, theta in ((2 * i, column * omega), (2 * i + 1, row * omega)):
                        cos, sin = theta.cos().to(y)[:, None], theta.sin().to(y)[:, None]
                        a, b = y[:, :, 2 * pair], y[:, :, 2 * pair + 1]  # (n, H)
                        numbers += [a * cos - b * sin, a * sin + b * cos]
                turned.append(torch.stack(numbers, dim=-1))  # (n, H, K)
            q, k = turned
            weights = (torch.einsum("ihk,jhk->hij", q, k) * K ** -0.5).softmax(-1)
            x = x + block.wo(torch.einsum("hij,jhk->ihk", weights, v).flatten(1))
            x = x + block.fc1(F.gelu(block.fc0(block.norm1(x)), approximate="tanh"))

        x = self.norm(x).view(t, h, w, D).mean(0)  # (h, w, D)
        windows = []
        for r in range(0, h, 2):
            for c in range(0, w, 2):
                windows.append(torch.cat([x[r, c], x[r, c + 1], x[r + 1, c], x[r + 1, c + 1]]))
        return self.projector(torch.stack(windows))

    @torch.compiler.disable  # grids are new in every batch
    def forward(self, patches, grids):
        """
        The same for many images, packed into one (L, D). Those with the same grid stand side by
        side and share one attention call; nothing else sees where an image ends.
        """
        grids = self.check(patches, grids)
        if not grids:
            return self.table.new_zeros(0, self.post_norm.weight.numel())
        alike = {}  # grid → the numbers of its images
        for number, grid in enumerate(grids):
            alike.setdefault(grid, []).append(number)
        packed = [number for numbers in alike.values() for number in numbers]
        pieces = patches.split([math.prod(grid) for grid in grids])
        patches = torch.cat([pieces[number] for number in packed])
        if patches.dtype == torch.uint8:
            patches = normalise(patches)

        spans, positions, turns = [], [], []
        for (t, h, w), numbers in alike.items():
            P = self.position(h, w).expand(t, h * w, -1)
            if t > 1:  # an image gets nothing for time
                P = P + self.time(t)[:, None]
            spans.append((len(numbers), t * h * w))
            positions.append(P.flatten(0, 1).repeat(len(numbers), 1))
            turns.append(self.turn(h, w).repeat(len(numbers) * t, 1))
        x = self.patch_map(patches.to(self.table.dtype)) + torch.cat(positions)  # (L, D)
        turn = torch.cat(turns)  # (L, K/2)
        for block in self.blocks:
            x = block(x, turn, spans)

        z = []
        parts = self.norm(x).split([images * n for images, n in spans])
        for part, grid in zip(parts, alike):
            z.append(merge(part.view(-1, *grid, part.shape[-1])))
        features = self.projector(torch.cat(z))  # (N, d)
        pieces = features.split([h * w // 4 for _, h, w in (grids[number] for number in packed)])
        back = dict(zip(packed, pieces))
        return torch.cat([back[number] for number in range(len(grids))])

    def projector(self, z):
        """(N, 4·D) → (N, d)."""
        return self.post_norm(self.proj2(F.gelu(self.proj0(z))))

    def position(self, h, w):
        """P, (h·w, D): the table where it has this size, else interpolated to it."""
        if (h, w) == self.table.shape[:2]:
            return self.table.flatten(0, 1)
        table = fp32(self.table).permute(2, 0, 1)  # (D, ·, ·)
        P = F.interpolate(table[None], (h, w), mode="bilinear", align_corners=False)[0]
        return P.flatten(1).T.to(self.table.dtype)

    def time(self, t):
        """τ, (t, D): what all patches of frame 0 … t − 1 of a clip get beside P."""
        half = self.table.shape[-1] // 2
        omega = 10000 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(t)[:, None] * omega  # (t, D/2)
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(self.table)

    def turn(self, h, w):
        """
        e^{iθ}, (h·w, K/2) complex, for each patch and pair of neighbouring numbers of a head: even
        pairs turn with the column, odd ones with the row.
        """
        K = self.blocks[0].wo.in_features // self.heads
        omega = 10000 ** (-4 * torch.arange(K // 4, dtype=torch.float64) / K)
        by_column = (torch.arange(w)[:, None] * omega).expand(h, -1, -1)  # (h, w, K/4)
        by_row = (torch.arange(h)[:, None, None] * omega).expand(-1, w, -1)
        theta = torch.stack([by_column, by_row], dim=-1).view(h * w, K // 2)
        wide = self.table.dtype == torch.float64
        turn = torch.polar(torch.ones_like(theta), theta)
        return turn.to(self.table.device, torch.complex128 if wide else torch.complex64)

    def check(self, patches, grids):
        """→ the grids, each as (t, h, w)."""
        width = 3 * self.patch ** 2
        if patches.dim() != 2 or patches.shape[1] != width:
            raise ValueError(f"patches: expected (L, {width}), {self.patch} × {self.patch} pixels "
                             f"of 3 channels, got {tuple(patches.shape)}")
        checked = []
        for number, grid in enumerate(grids):
            grid = tuple(map(int, grid))
            if len(grid) not in (2, 3) or min(grid) < 1:
                raise ValueError(f"grid {number} is {grid}: expected (h, w) or (t, h, w), in "
                                 "patches")
            t, h, w = (1, *grid)[-3:]
            if h % 2 or w % 2:
                raise ValueError(f"grid {number} has {h} × {w} patches: expected even numbers, as "
                                 "2 × 2 patches make a feature")
            if t > FRAMES:
                raise ValueError(f"grid {number} has {t} frames: expected at most {FRAMES}; cut it "
                                 "into several clips")
            checked.append((t, h, w))
        expected = sum(map(math.prod, checked))
        if len(patches) != expected:
            raise ValueError(f"patches: {len(checked)} grids have {expected} patches together, "
                             f"got {len(patches)}")
        return checked


class Block(nn.Module):
    """x (L, D) of packed images → the same shape. spans: (images, patches of each), in order."""

    def __init__(self, config):
        super().__init__()
        D, Q, mlp = config.vit_width, config.vit_attn_width, config.vit_mlp_width
        self.heads = config.vit_heads
        self.norm0 = RMSNorm(D, EPS)
        self.wqkv = nn.Linear(D, 3 * Q, bias=False)
        self.wo = nn.Linear(Q, D, bias=False)
        self.norm1 = RMSNorm(D, EPS)
        self.fc0 = nn.Linear(D, mlp, bias=False)
        self.fc1 = nn.Linear(mlp, D, bias=False)

    def forward(self, x, turn, spans):
        qkv = self.wqkv(self.norm0(x)).view(len(x), 3, self.heads, -1)  # (L, 3, H, K)
        lengths = [images * n for images, n in spans]
        qk, v = qkv.split((2, 1), dim=1)
        turned, values = rotate(qk, turn).split(lengths), v.split(lengths)
        o = []
        for qk, v, (images, n) in zip(turned, values, spans):
            q, k = qk.view(images, n, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
            v = v.reshape(images, n, self.heads, -1).transpose(1, 2)  # (images, H, n, K)
            y = F.scaled_dot_product_attention(q, k, v)
            o.append(y.transpose(1, 2).flatten(2).flatten(0, 1))  # (images·n, H·K)
        x = x + self.wo(torch.cat(o))
        return x + self.fc1(F.gelu(self.fc0(self.norm1(x)), approximate="tanh"))


def rotate(qk, turn):
    """qk (L, 2, H, K), turn (L, K/2) complex → qk, each pair of neighbours turned, in fp32."""
    pairs = torch.view_as_complex(fp32(qk).unflatten(-1, (-1, 2)))  # (L, 2, H, K/2)
    return torch.view_as_real(pairs * turn[:, None, None]).flatten(-2).to(qk.dtype)


def merge(x):
    """(images, t, h, w, D) → (images · h/2 · w/2, 4·D): a mean over frames, then 2 × 2 windows."""
    images, _, h, w, D = x.shape
    windows = x.mean(1).view(images, h // 2, 2, w // 2, 2, D).transpose(2, 3)
    return windows.reshape(-1, 4 * D)


def images_here(images, pads, group):
    """
    Context parallelism: (patches, grids) of whole sequences, pads (B, T) of this rank's segments →
    those of the images that have pads here, and which of their features these are. A row's pads are
    spread over the ranks of the group in order; an image may have some on two ranks.
    """
    patches, grids = images
    features_of = torch.tensor([math.prod(grid[-2:]) // 4 for grid in grids], dtype=torch.int64)
    patches_of = torch.tensor([math.prod(grid) for grid in grids], dtype=torch.int64)
    image = torch.arange(len(grids))
    of_feature, of_patch = (image.repeat_interleave(n) for n in (features_of, patches_of))
    here = pads.sum(1)  # (B)
    counts = [torch.empty_like(here) for _ in range(group.size())]
    dist.all_gather(counts, here, group=group)
    counts = torch.stack(counts, dim=1)  # (B, ranks)
    first = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)[:, group.rank()]
    if counts.sum() != len(of_feature):
        raise ValueError(wrong_count(counts.sum(), len(of_feature)))
    at = torch.cat([torch.arange(i, i + n) for i, n in zip(first.tolist(), here.tolist())])
    ours = of_feature[at].unique()
    kept = torch.isin(of_feature, ours)  # (N)
    patches = patches[torch.isin(of_patch, ours).to(patches.device)]
    return (patches, [grids[i] for i in ours]), (kept.cumsum(0) - 1)[at].to(patches.device)


def wrong_count(pads, features):
    return (f"idx has {pads} image pads, but the images have {features} features; expected one pad "
            "for each")
