// amx_sft_moe: the expert part of Mixture-of-Experts layers with LoRA, forward and backward, on the CPU.
//
// Header-only C++20. Include this file, link OpenMP (CMake: target amx_sft_moe::amx_sft_moe, which requires it) or have
// one thread, pass no -m flags: each kernel's instructions are enabled where they are used, and the CPU is asked at run
// time.
//
// The layers, from below; each includes only what stands above it in this list:
//
//   core/       element types, views, errors, activations as policies
//   parallel/   regions of tasks: the only place that knows OpenMP
//   profile/    the list of phases, the recorder, NVTX ranges, dumps and traces
//   arch/       instruction sets: microkernels and row operations, the only place with vector intrinsics
//   gemm/       gemm_nt, gemm_nn, gemm_tn over panels or strips; blocking constants
//   lora/       adapters and their own products
//   moe/        routing, workspace, the phases of forward and backward
//   kernels/    policies: which microkernel, row operations and types make a kernel
//   operator/   AMX_SFT_MOE<Kernel>, validation, the stack of saved activations, choice of kernel at run time
#pragma once

#include "amx_sft_moe/core/config_macros.hpp"
// Behind the macros, what uses them.
#include "amx_sft_moe/arch/cpu_features.hpp"
#include "amx_sft_moe/core/activation.hpp"
#include "amx_sft_moe/core/aligned_buffer.hpp"
#include "amx_sft_moe/core/element.hpp"
#include "amx_sft_moe/core/errors.hpp"
#include "amx_sft_moe/core/kernel_state.hpp"
#include "amx_sft_moe/core/views.hpp"
#include "amx_sft_moe/gemm/forms.hpp"
#include "amx_sft_moe/kernels/amx_bf16.hpp"
#include "amx_sft_moe/kernels/avx2.hpp"
#include "amx_sft_moe/kernels/avx512.hpp"
#include "amx_sft_moe/kernels/avx512_bf16.hpp"
#include "amx_sft_moe/kernels/kernel_list.hpp"
#include "amx_sft_moe/kernels/portable.hpp"
#include "amx_sft_moe/lora/adapter.hpp"
#include "amx_sft_moe/moe/gradients.hpp"
#include "amx_sft_moe/operator/amx_sft_moe.hpp"
#include "amx_sft_moe/operator/any_sft_moe.hpp"
#include "amx_sft_moe/operator/kernel_provider.hpp"
#include "amx_sft_moe/operator/kernel_registry.hpp"
#include "amx_sft_moe/parallel/tasks.hpp"
#include "amx_sft_moe/profile/backward_timer.hpp"
#include "amx_sft_moe/profile/dump.hpp"
#include "amx_sft_moe/profile/json_dump.hpp"
#include "amx_sft_moe/profile/step_observer.hpp"
#include "amx_sft_moe/profile/step_record.hpp"
#include "amx_sft_moe/profile/step_totals.hpp"
#include "amx_sft_moe/profile/trace_dump.hpp"
//
#include "amx_sft_moe/core/undef_macros.hpp"
