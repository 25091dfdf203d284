"""Inputs whose softmax looks like a trained language model's, made from nothing.

Random normal inputs have a nearly flat softmax, which no trained model has, and on which whatever exploits sparsity
cannot be judged. Measured on a small language model with a vocabulary of 131k ids in order of frequency, trained on
text: entropy 1.2-2.1 nats; a mean of 55-101 and a median of 11-46 entries above 2^-12 in a row; of the blocks of 128
tokens x 128 ids, 0.15-0.21 hold any such entry, and the others 0.2-0.5 % of the probability.

The logit of id v in row i is put together from what makes a model's:

    k_i prior(v)      word frequency: a power law over the ids that ends in a flat tail, sharper or flatter by row
    + a_i [v in T_i]  a topic: ids scattered over the ranks that rise together; a document has few of them
    + m_i [v = s_i]   the expected next token, from almost certain to not there at all
    + noise           of the size that the random directions of 4096 to 512 dimensions leave between ids anyway

each along its own direction, so that `hidden @ weight.T` is those sums. Targets are sampled from the softmax itself,
as a calibrated model's are. The figures above hold between 128k and 152k ids and for a hidden size of 384 and more
(tests/test_benchmarks.py); at 262144 ids and 640 dimensions the dropped mass is just above its range.
"""

from __future__ import annotations

import math

import torch

# found by trying; the comments say what each moves
POWER, SCALE = 3.3, 75.0  # of the frequency law: how many ids an uncertain row spreads over
TAIL = 0.02  # probability that the law leaves to its flat tail: most of what a filter drops
PRIOR_JITTER, SHARPNESS_JITTER = 0.3, 0.15  # "rough" frequency order; the k_i
TOPIC_IDS, TOPIC_FROM, TOPIC_SPREAD = 100, 256, 4000 / 131072  # size and ranks of a topic: the number of kept blocks
TOPIC_LOGIT = (8.5, 1.0)
DOCUMENT, DOCUMENT_TOPICS = 256, 2 / 131072  # tokens of a document; its topics, per id of the vocabulary
SURE = (3.5, 5.5)  # log-odds of the expected token: entropy, and how far apart mean and median lie
EXPECTED_POWER, EXPECTED_SCALE = 1.25, 30.0  # frequency law of the expected tokens
NOISE = 0.4
HEAD_NOISE, HEAD_RANKS = 1.0, 1000.0  # frequent ids vary more from row to row


def trained_inputs(shape, device: torch.device, gen: torch.Generator):
    n, v, h = shape.tokens, shape.vocab, shape.hidden

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, generator=gen)

    # the frequency law has a direction of its own; all others are kept out of it, or they would tilt the law by row
    law = normal(1, h)
    law /= law.norm()

    def directions(count: int) -> torch.Tensor:
        """Of length about 1."""
        x = normal(count, h).mul_(h**-0.5)
        return x.addmm_(x @ law.T, law, alpha=-1)

    rank = torch.arange(v, device=device, dtype=torch.float32)
    prior = -POWER * torch.log1p(rank / SCALE) + PRIOR_JITTER * normal(v)
    tail = torch.logsumexp(prior, 0) + math.log(TAIL / v)
    prior = torch.logaddexp(prior, tail)

    # as many ids of topics in every octave of ranks; each topic has one of every run of them, so all are alike
    chance = TOPIC_SPREAD * v / (rank + 1)
    topical = (torch.rand(v, device=device, generator=gen) < chance) & (rank >= min(TOPIC_FROM, v // 8))
    ids = topical.nonzero()[:, 0]
    document_topics = max(2, round(DOCUMENT_TOPICS * v))
    topics = max(document_topics, len(ids) // TOPIC_IDS)
    runs = [torch.randperm(topics, device=device, generator=gen) for _ in range(len(ids) // topics + 1)]
    topic_of = torch.cat(runs)[: len(ids)]
    topic = directions(topics)

    weight = directions(v)
    length = 1 + HEAD_NOISE / (1 + rank / HEAD_RANKS)
    weight *= length[:, None]

    # rows: expected token, topic, certainty
    expected = torch.multinomial((rank + EXPECTED_SCALE) ** -EXPECTED_POWER, n, replacement=True, generator=gen)
    documents = math.ceil(n / DOCUMENT)
    of_document = torch.rand(documents, topics, device=device, generator=gen).argsort(1)[:, :document_topics]
    pick = torch.randint(document_topics, (n,), device=device, generator=gen)
    row_topic = of_document[torch.arange(n, device=device) // DOCUMENT, pick]
    topic_logit = TOPIC_LOGIT[0] + TOPIC_LOGIT[1] * normal(n)
    # quantiles instead of draws: a few thousand rows have the same mix as a million
    quantile = (torch.randperm(n, device=device, generator=gen) + 0.5) / n
    sure = SURE[0] + SURE[1] * math.sqrt(2) * torch.erfinv(2 * quantile - 1)

    # the margin that gives the expected token its odds against everything else in the row
    topic_mass = torch.zeros(topics, device=device).index_add_(0, topic_of, prior[ids].exp())
    others = torch.logaddexp(torch.logsumexp(prior, 0), topic_logit + topic_mass.clamp(min=1e-30).log()[row_topic])
    margin = (sure + others - prior[expected]).clamp(min=0)

    hidden = topic_logit[:, None] * topic[row_topic]
    hidden += (margin / length[expected] ** 2)[:, None] * weight[expected]
    # crosstalk between random directions is |hidden| / sqrt(h): filled up to the same noise at every hidden size
    missing = (h * NOISE**2 - hidden.square().sum(-1)).clamp(min=0).sqrt()
    hidden += missing[:, None] * directions(n)
    hidden += (1 + SHARPNESS_JITTER * normal(n, 1)).clamp(min=0.3) * law

    weight[ids] += topic[topic_of]
    weight.addmm_(prior[:, None], law)

    targets = torch.empty(n, dtype=torch.long, device=device)
    slab = max(1, (1 << 25) // v)
    for i in range(0, n, slab):
        p = (hidden[i : i + slab] @ weight.T).softmax(-1)
        targets[i : i + slab] = torch.multinomial(p, 1, generator=gen)[:, 0]
    return hidden, weight, targets


@torch.no_grad()
def softmax_statistics(hidden: torch.Tensor, weight: torch.Tensor, rows: int = 2048, eps: float = 2**-12) -> dict:
    """What is claimed above, measured over the first rows, in blocks of 128 tokens x 128 ids."""
    block = min(128, len(hidden))
    rows = min(rows, len(hidden)) // block * block
    tiles = -(-weight.shape[0] // 128)
    weight = weight.detach().float()
    entropy, entries, kept, pairs, dropped = [], [], [], [], []
    for i in range(0, rows, block):
        log_p = (hidden[i : i + block].detach().float() @ weight.T).log_softmax(-1)
        p = log_p.exp()
        entropy.append(-(p * log_p).sum(-1))
        entries.append((p > eps).sum(-1).float())
        by_tile = torch.nn.functional.pad(p, (0, tiles * 128 - p.shape[1])).view(block, tiles, 128)
        above = (by_tile > eps).any(-1)
        pairs.append(above.float().mean())
        kept.append(above.any(0))
        dropped.append((by_tile.sum(-1) * ~kept[-1]).sum(-1).mean())
    entries = torch.cat(entries)
    return {
        "rows": rows,
        "entropy": round(float(torch.cat(entropy).mean()), 4),
        "entries_mean": round(float(entries.mean()), 2),
        "entries_median": float(entries.median()),
        "kept_blocks": round(float(torch.stack(kept).float().mean()), 4),
        "kept_row_tiles": round(float(torch.stack(pairs).mean()), 4),
        "dropped_mass": round(float(torch.stack(dropped).mean()), 6),
    }
