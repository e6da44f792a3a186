"""Why fields of AReaL's have no counterpart."""

from __future__ import annotations

from fnmatch import fnmatchcase

SILENT = "Empty there"
UNKNOWN = "Unknown to the converter: look at the script that reads it"

# The first pattern that matches counts.
REASONS = (
    ("*experiment_name", "A run is named after its gin file; train.name and train.project choose"),
    ("*trial_name", "A run is named after its gin file; train.name and train.project choose"),
    ("*.fileroot", "Everything of a run is in its directory, in train.runs"),
    ("*scheduling_spec", "`areal-x launch` writes jobs; cluster.* places processes (docs/cluster.md)"),
    ("*scheduling_strategy*", "A reference and a critic are in the trainer's processes"),
    ("scheduler*", "`areal-x launch` writes jobs; cluster.* places processes (docs/cluster.md)"),
    ("launcher*", "`areal-x launch` writes jobs; cluster.* places processes (docs/cluster.md)"),
    ("scaling*", "vllm.least and vllm.most let the number of servers follow the load"),
    ("cluster.n*", "Ray counts the nodes and accelerators of its cluster (docs/cluster.md)"),
    ("cluster.*", "Ray finds processes (docs/cluster.md)"),
    ("*.disable_dropout", "Dropout is always off"),
    ("*.init_from_scratch", "A model is read from a directory or the hub; model.path may be a function"),
    ("*.attn_impl", "model.attention chooses by hardware"),
    ("*.weight_update_mode", "vllm.transport is 'files', through shared memory; docs/torch.md has others"),
    ("*.pad_to_maximum", "Rows have the length train.row_length"),
    ("*.mb_spec.*", "trainer.micro_batch_rows counts rows"),
    ("*.grad_reduce_dtype", "Gradients are reduced in fp32"),
    ("*loss_scale*", "bf16 needs no loss scale"),
    ("*.hysteresis", "bf16 needs no loss scale"),
    ("*.optimizer.*", "The critic shares optimizer.* but its learning rate; a reference has none"),
    ("*.fsdp.*", "mesh.* divides the model (docs/torch.md)"),
    ("*.megatron.*", "mesh.* divides the model (docs/torch.md)"),
    ("*.archon.*", "mesh.* divides the model (docs/torch.md)"),
    ("actor.adv_norm*", "Advantages that are relative to their group are not whitened over the batch again"),
    ("actor.reward_norm*", "group_relative uses the unbiased deviation; group_relative.eps is 1e-6"),
    ("actor.reward_clip", "Clip in the reward function"),
    ("actor.reward_*", "Scale and shift in the reward function"),
    ("critic.mask_no_eos_with_zero", "The critic is trained on what the policy is"),
    ("actor.kl_*", "kl_ctl is 0"),
    ("actor.log_agent_stats*", "The journal has every trajectory (docs/journal.md)"),
    ("actor.eps_clip*", "The recipe has no clip"),
    ("actor.sapo_*", "The loss is not SAPO"),
    ("actor.behav*", "The loss is not decoupled, or the recipe corrects in its own way"),
    ("actor.*logp*", "The recipe has its own proximal policy"),
    ("actor.recompute_logprob", "The recipe has its own proximal policy"),
    ("actor.use_decoupled_loss", "The recipe has its own proximal policy"),
    ("actor.rejection_sampling*", "Bind NAME.corrections = @corrections.masked or @corrections.truncated"),
    ("actor.discount", "Only ppo and reinforce_pp discount"),
    ("actor.gae_lambda", "Only ppo estimates with λ"),
    ("actor.overlong*", "The penalty is off"),
    ("actor.*colocated*", "train.colocate is its counterpart"),
    ("enable_offload", "train.colocate is its counterpart"),
    ("ref.*", "A reference is frozen, in the policy's precision; it is only loaded for a KL penalty"),
    ("critic.*", "The critic shares the policy's settings"),
    ("gconfig.greedy", "Training samples; evaluation is greedy"),
    ("gconfig.min_new_tokens", "Answers end where the model ends them"),
    ("gconfig.stop", "sampling.stop_token_ids takes tokens; a workflow may cut text"),
    ("gconfig.frequency_penalty", "Penalties change the sampled distribution, so that no ratio would be exact"),
    ("gconfig.lora*", "Servers get the adapters by themselves"),
    ("gconfig.*", "The sampled distribution must be the policy's (docs/rollout.md)"),
    ("rollout.*tim*", "vllm.start_timeout_seconds, train.episode_seconds and vllm.silence_seconds"),
    ("rollout.*trac*", "timeline.json and the journal are always written"),
    ("rollout.dump_to_file", "The journal has every trajectory (docs/journal.md)"),
    ("rollout.*", "The runner keeps the servers full by itself (docs/concepts.md)"),
    ("*.model", "Servers serve model.path"),
    ("*.model_path", "Servers serve model.path"),
    ("*.context_length", "Servers take train.row_length; vllm.context shortens it"),
    ("*.max_model_len", "Servers take train.row_length; vllm.context shortens it"),
    ("sglang.*", "sglang.arguments passes options of the server, as pairs of words"),
    ("vllm.*", "vllm.arguments passes options of the server, as pairs of words"),
    ("*_dataset.batch_size", "All held-out tasks are evaluated together"),
    ("*_dataset.max_length", "The training tasks' limit counts"),
    ("*_dataset.shuffle", "Training tasks are shuffled anew each epoch, by train.seed"),
    ("*_dataset.*", "A dataset is a list in memory"),
    ("*.freq_secs", "Checkpoints, exports and evaluations are counted in steps"),
    ("*.freq_epochs", "It needs the number of tasks: --tasks N"),
    ("recover.*", "--resume and --retries of `areal-x train` restart a run"),
    ("saver.*", "areal-x export writes any checkpoint as a model"),
    ("stats_logger.tensorboard*", "TensorBoard files are always written"),
    ("stats_logger.*key*", "Keys are taken from the environment, as WANDB_API_KEY"),
    ("stats_logger.*", "The logger is off, or names the run itself"),
    ("perf_tracer*", "timeline.json is always written; train.profile_steps profiles operations"),
    ("valid_dataset*", "There is no path to hold out tasks from"),
    ("total_train_n_seqs", "train.steps ends a run"),
    ("tokenizer_path", "The tokenizer is the model's"),
    ("async_training", "train.max_staleness = 0 is synchronous"),
    ("dynamic_bs", "Steps have train.groups_per_step groups"),
)  # fmt: skip


def reason_for(path: str, unused: str = "") -> str:
    """Returns why a field was not carried over. unused: the server program that does not generate."""
    if unused and path.startswith(f"{unused}."):
        return f"The run has no servers of {unused}"
    return next((why for pattern, why in REASONS if fnmatchcase(path, pattern)), UNKNOWN)
