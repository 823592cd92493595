# One binary on CPUs that this machine is not: the consumers' program, built here, under qemu-user with an SSE2-only
# CPU and others up to AVX2 (qemu's translator knows no AVX512). It must start, choose a kernel that the CPU has, and
# give the same bits as the same kernel gives here. Without qemu it is skipped, with AMX_SFT_MOE_REQUIRE_ALL=1 in the
# environment it fails.
#     cmake -DSOURCE=... -DWORK=... -DCOMPILER=... -P run.cmake
cmake_minimum_required(VERSION 3.24)
find_program(QEMU qemu-x86_64)
if(NOT QEMU AND "$ENV{AMX_SFT_MOE_REQUIRE_ALL}")
  message(FATAL_ERROR "AMX_SFT_MOE_REQUIRE_ALL: not installed: qemu-x86_64 (Debian: apt-get install qemu-user)")
elseif(NOT QEMU)
  message(STATUS "SKIPPED: no qemu-x86_64 (Debian: apt-get install qemu-user)")
  return()
endif()
set(ENV{OMP_WAIT_POLICY} passive)
set(ENV{OMP_NUM_THREADS} 2)
unset(ENV{AMX_SFT_MOE_KERNEL})

# CPU, as qemu names it: the most that it has. Each has less than the next.
set(cpus
    "qemu64,-sse3,-ssse3,-sse4.1,-sse4.2,-popcnt,-cx16,-abm,-sse4a|sse2"
    "core2duo|sse3"
    "Nehalem|sse4.1"
    "Haswell|avx2"
    "max|avx2")
set(instructions sse2 sse3 sse4.1 avx2 avx512f)

file(MAKE_DIRECTORY ${WORK})
foreach(program IN ITEMS consumers/main qemu/one_instruction)
  get_filename_component(name ${program} NAME)
  execute_process(COMMAND ${COMPILER} -std=c++20 -O2 -I ${SOURCE}/include -fopenmp ${SOURCE}/tests/${program}.cpp
                  -o ${WORK}/${name} COMMAND_ERROR_IS_FATAL ANY)
endforeach()

execute_process(COMMAND ${WORK}/main OUTPUT_VARIABLE native COMMAND_ERROR_IS_FATAL ANY)
message(STATUS "here:\n${native}")

# The emulated CPU executes what it should have and refuses the next instruction set.
function(check_instructions model has)
  list(FIND instructions ${has} last)
  math(EXPR first_missing "${last} + 1")
  list(GET instructions ${first_missing} missing)
  execute_process(COMMAND ${QEMU} -cpu ${model} ${WORK}/one_instruction ${has} RESULT_VARIABLE result ERROR_QUIET)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${model}: expected ${has} to work, got ${result}")
  endif()
  execute_process(COMMAND ${QEMU} -cpu ${model} ${WORK}/one_instruction ${missing} RESULT_VARIABLE result ERROR_QUIET)
  if(result EQUAL 0)
    message(FATAL_ERROR "${model}: expected ${missing} to be refused, but it was executed")
  endif()
endfunction()

foreach(cpu IN LISTS cpus)
  string(REPLACE "|" ";" cpu "${cpu}")
  list(GET cpu 0 model)
  list(GET cpu 1 has)
  check_instructions(${model} ${has})
  execute_process(COMMAND ${QEMU} -cpu ${model} ${WORK}/main RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_QUIET)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${model}: status ${result}\n${output}")
  endif()

  # Every kernel that runs there and here gives the same line.
  string(REGEX MATCHALL "[^\n]*: bits [0-9a-f]+" lines "${output}")
  set(names "")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE ": bits.*" "" kernel "${line}")
    list(APPEND names ${kernel})
    string(REGEX MATCH "(^|\n)${kernel}: bits [0-9a-f]+" expected "${native}")
    string(STRIP "${expected}" expected)
    if(expected AND NOT line STREQUAL expected)
      message(FATAL_ERROR "${model}: ${line}\nexpected ${expected}")
    endif()
  endforeach()
  foreach(dtype IN ITEMS fp32 bf16)
    if(NOT "portable ${dtype}" IN_LIST names)
      message(FATAL_ERROR "${model}: portable did not run with ${dtype} weights\n${output}")
    endif()
    # avx2 is refused where it would not run, and runs where it would.
    if(output MATCHES "(^|\n)avx2 ${dtype}: ")
      if(has STREQUAL "avx2" AND NOT "avx2 ${dtype}" IN_LIST names)
        message(FATAL_ERROR "${model}: avx2 did not run with ${dtype} weights\n${output}")
      elseif(NOT has STREQUAL "avx2" AND "avx2 ${dtype}" IN_LIST names)
        message(FATAL_ERROR "${model}: avx2 ran where there is none\n${output}")
      endif()
    endif()
    string(REGEX MATCH "auto ${dtype}: ([a-z0-9_]+)" chosen "${output}")
    if(NOT "${CMAKE_MATCH_1} ${dtype}" IN_LIST names)
      message(FATAL_ERROR "${model}: auto chose ${CMAKE_MATCH_1}, which did not run\n${output}")
    endif()
  endforeach()
  message(STATUS "${model}: runs ${names}; the same bits as here")
endforeach()
