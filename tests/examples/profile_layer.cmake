# The check passes, every part of the report is there, and mistakes are named.
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)
set(small --shape small --tokens 16 --rank 4 --warmup 1 --iterations 2 --threads 2)
foreach(kernel auto portable)
  run(output ${small} --kernel ${kernel})
  foreach(part "check, 4 tokens against float64: largest relative error [0-9.e-]+" "full_train_loop +[0-9.]+"
          "backward_gate_up +[0-9.]+ +[0-9.]+ %" "    D3_gemm +[0-9.]+ +[0-9.]+ % +[0-9]+ +[0-9.]+ % +[0-9.]+"
          "thread 0 +busy +[0-9.]+ ms, waiting +[0-9.]+ ms" "imbalance [0-9.]+ %, [3-6] synchronisation points" "\\[BWD TIMER\\] backward_gate_up: [0-9.]+ ms")
    if(NOT output MATCHES "${part}")
      message(FATAL_ERROR "no '${part}' in\n${output}")
    endif()
  endforeach()
endforeach()
must_fail("no such shape" --shape large)
must_fail("no such option" --token 3)
must_fail("positive number" --tokens 0)
must_fail("expected a value" --tokens)
must_fail("no such kernel" ${small} --kernel none)
