"""Benchmarks: what `kbit bench`, `kbit tune`, `kbit profile` and `kbit eval` measure, by command.

    bench kernels      kernels, kernel_rows, kernel_tables, peers, ncu
    bench check, plot  check; plots, chat_plot, generate_plot, profile_plot, quality_plot; targets
    bench dequant      dequant, conversions
    bench moe, nvfp4   moe, moe_layer, moe_router; nvfp4, nvfp4_layer, nvfp4_levers; both with routings
    bench attention    attention
    bench model        model, model_build, model_decode, model_profile; --gpus: model_ranks, model_split
    bench generate     generate
    bench chat         chat
    bench train        train
    bench serve        serve, random_models, child, ports
    bench quantize     quantize, random_models
    bench cpu, decode  cpu, cpu_timing; decode
    bench workload     workload
    bench report       report
    tune               tune, tune_record, tune_sources
    profile            profile
    eval               quality, quality_peers

What they share: `gpu_timing`, the protocol on GPUs; `repeats` and their medians; `shapes` of layers;
`correctness`, since results are compared before they are timed; the `machine`; `kernel_kinds`, which say what
a profile's kernels are for; `result_files` and `text_table`. `kbit.cli` reads options.
"""
