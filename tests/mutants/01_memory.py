"""Wrong solutions of lesson 01: bytes counted twice, micro-batches weighed wrongly."""

import torch

from tests.mutants import mutant

RETURNS = "comes to its end on every rank"
PARAMETERS = "predicts the parameters to the byte"
GRADIENTS = "predicts the gradients to the byte"
STATES = "predicts the optimizer states to the byte"
KEPT = "leaves the model as it was"
LOSS = "returns the loss of the whole batch"
UPDATE = "updates the model as the whole batch would"
ACTIVATIONS = "keeps the activations of one micro-batch"
TWO = "is exact at two bytes an element"
MORE = "is exact at four and eight bytes an element"


def right_states(params, optimizer, precision, *, steps=4):
    """The right numbers for these parameters."""
    trained = [p for p in params if p.requires_grad]
    numel, trained_numel = sum(p.numel() for p in params), sum(p.numel() for p in trained)
    element_nbytes = 2 if precision == "mixed" else 4
    fp32 = {"sgd": 0, "momentum": 1, "adamw": 2}[optimizer] + (precision == "mixed")
    counts = steps * len(trained) if optimizer == "adamw" else 0
    return {
        "parameters": element_nbytes * numel,
        "gradients": element_nbytes * trained_numel,
        "optimizer states": 4 * fp32 * trained_numel + counts,
    }


@mutant("training_nbytes", fails=(PARAMETERS, GRADIENTS, STATES))
def counts_a_tied_weight_twice(model, optimizer, precision):
    """Walks over the modules, where a tied weight has two names."""
    params = [p for module in model.modules() for p in module.parameters(recurse=False)]
    return right_states(params, optimizer, precision)


@mutant("training_nbytes", fails=(GRADIENTS, STATES))
def trains_what_is_frozen(model, optimizer, precision):
    """Gradients and states for every parameter."""
    params = [torch.nn.Parameter(p.detach()) for p in model.parameters()]
    return right_states(params, optimizer, precision)


@mutant("training_nbytes", fails=STATES)
def forgets_the_step_counts(model, optimizer, precision):
    """Two numbers per parameter, as the papers count AdamW."""
    return right_states(list(model.parameters()), optimizer, precision, steps=0)


@mutant("training_nbytes", fails=(PARAMETERS, GRADIENTS, STATES))
def four_bytes_everywhere(model, optimizer, precision):
    """The right total of AdamW in mixed precision, 16 bytes a parameter, in the wrong places."""
    return right_states(list(model.parameters()), optimizer, "fp32")


@mutant("training_nbytes", fails=PARAMETERS)
def counts_buffers(model, optimizer, precision):
    """Batch norm's running statistics are no parameters."""
    right = right_states(list(model.parameters()), optimizer, precision)
    extra = sum(b.numel() for b in model.buffers())
    return right | {"parameters": right["parameters"] + (2 if precision == "mixed" else 4) * extra}


@mutant("training_nbytes", fails=KEPT)
def casts_the_model(model, optimizer, precision):
    """Right numbers, and the caller's model is in bfloat16 afterwards."""
    right = right_states(list(model.parameters()), optimizer, precision)
    if precision == "mixed":
        model.bfloat16()
    return right


def microbatches(batch, num_microbatches):
    """(tokens, targets, the share of the targets that count) of each micro-batch."""
    tokens, targets = (part.tensor_split(num_microbatches) for part in batch)
    total = (batch[1] != -100).sum().item()
    shares = [(part != -100).sum().item() / total for part in targets]
    return list(zip(tokens, targets, shares, strict=True))


@mutant("train_step", fails=(LOSS, UPDATE))
def mean_of_means(model, optimizer, batch, num_microbatches):
    """Each micro-batch weighs the same, however few of its targets count."""
    optimizer.zero_grad()
    total = 0.0
    for tokens, targets, share in microbatches(batch, num_microbatches):
        if share:
            loss = model(tokens, targets) / num_microbatches
            loss.backward()
            total += loss.item()
    optimizer.step()
    return total


@mutant("train_step", fails=LOSS)
def zero_times_nan(model, optimizer, batch, num_microbatches):
    """The mean over no target is nan, and so is nan times a share of 0."""
    optimizer.zero_grad()
    total = 0.0
    for tokens, targets, share in microbatches(batch, num_microbatches):
        loss = model(tokens, targets) * share
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


@mutant("train_step", fails=ACTIVATIONS)
def one_backward_for_all(model, optimizer, batch, num_microbatches):
    """Adds up the losses first, so every micro-batch's graph lives to the end."""
    optimizer.zero_grad()
    parts = microbatches(batch, num_microbatches)
    loss = sum(share * model(tokens, targets) for tokens, targets, share in parts if share)
    loss.backward()
    optimizer.step()
    return loss.item()


@mutant("train_step", fails=(LOSS, UPDATE))
def steps_every_time(model, optimizer, batch, num_microbatches):
    """A step for each micro-batch: smaller batches, not accumulated gradients."""
    total = 0.0
    for tokens, targets, share in microbatches(batch, num_microbatches):
        if share:
            optimizer.zero_grad()
            loss = share * model(tokens, targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total


@mutant("train_step", fails=UPDATE)
def keeps_old_gradients(model, optimizer, batch, num_microbatches):
    """The second step still has the first one's gradients in it."""
    total = 0.0
    for tokens, targets, share in microbatches(batch, num_microbatches):
        if share:
            loss = share * model(tokens, targets)
            loss.backward()
            total += loss.item()
    optimizer.step()
    return total


@mutant("train_step", fails=RETURNS)
def only_even_microbatches(model, optimizer, batch, num_microbatches):
    """Works when num_microbatches divides the rows, and raises else."""
    tokens, targets = (part.view(num_microbatches, -1, part.shape[1]) for part in batch)
    optimizer.zero_grad()
    counts = (targets != -100).sum(dim=(1, 2))
    total = 0.0
    for index in range(num_microbatches):
        loss = model(tokens[index], targets[index]) * (counts[index] / counts.sum()).item()
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def lean_nbytes(s, b, h, a, e, *, values=12, scores=1, masks=2, score_masks=0, norms=4):
    """The right formula, and what may be wrong with it."""
    sbh, as2b = s * b * h, a * s * s * b
    return e * (values * sbh + scores * as2b + norms * s * b) + masks * sbh + score_masks * as2b


@mutant("lean_block_nbytes", fails=(TWO, MORE))
def the_papers_formula(s, b, h, a, element_nbytes):
    """GELU and attention dropout, which this layer does not have."""
    return lean_nbytes(s, b, h, a, element_nbytes, values=16, scores=2, score_masks=1)


@mutant("lean_block_nbytes", fails=(TWO, MORE))
def counts_the_input_of_relu(s, b, h, a, element_nbytes):
    """ReLU needs its output alone, and the next layer keeps that anyway."""
    return lean_nbytes(s, b, h, a, element_nbytes, values=16)


@mutant("lean_block_nbytes", fails=(TWO, MORE))
def counts_softmax_twice(s, b, h, a, element_nbytes):
    """Softmax and the product with V keep one and the same tensor."""
    return lean_nbytes(s, b, h, a, element_nbytes, scores=2)


@mutant("lean_block_nbytes", fails=(TWO, MORE))
def forgets_the_norms_statistics(s, b, h, a, element_nbytes):
    """Small, and yet bytes."""
    return lean_nbytes(s, b, h, a, element_nbytes, norms=0)


@mutant("lean_block_nbytes", fails=MORE)
def two_bytes_for_ever(s, b, h, a, element_nbytes):
    """The paper's units, whatever the dtype."""
    return lean_nbytes(s, b, h, a, 2)


@mutant("lean_block_nbytes", fails=(TWO, MORE))
def masks_of_the_dtype(s, b, h, a, element_nbytes):
    """A mask takes one byte an element in any precision."""
    return lean_nbytes(s, b, h, a, element_nbytes, masks=2 * element_nbytes)
