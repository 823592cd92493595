# Units of one program that the compiler makes otherwise have libraries of their own: the inline namespace differs. And what
# the library cannot be compiled with is said in a sentence. Only the preprocessor runs.
#   cmake -DSOURCE=... -DWORK=... -DCOMPILER=... -P unlike_units.cmake
file(MAKE_DIRECTORY "${WORK}")
file(WRITE "${WORK}/name.cpp" "#include \"amx_sft_moe/core/config_macros.hpp\"\nname: AMX_SFT_MOE_ABI\n")

function(preprocess result name error)
  execute_process(COMMAND "${COMPILER}" -I "${SOURCE}/include" ${ARGN} -E -P name.cpp WORKING_DIRECTORY "${WORK}"
                  RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE complaint)
  string(REGEX MATCH "name: ([a-z0-9_]+)" found "${text}")
  set(${result} "${code}" PARENT_SCOPE)
  set(${name} "${CMAKE_MATCH_1}" PARENT_SCOPE)
  set(${error} "${complaint}" PARENT_SCOPE)
endfunction()

# Of parts of fast math other than this one clang has no macros.
if(NOT COMPILER MATCHES "clang")
  set(parts_of_fast_math "-funsafe-math-optimizations" "-funsafe-math-optimizations -ffinite-math-only")
endif()
set(seen "")
foreach(flags ${parts_of_fast_math} "-O2" "-fopenmp" "-ffinite-math-only" "-ffast-math" "-mavx" "-mfma" "-mavx2 -mno-fma" "-mavx2 -mfma"
        "-mavx512f -mfma" "-mavx512f -mavx512vl -mavx512bw -mavx512dq -mfma" "-march=cooperlake" "-march=sapphirerapids"
        "-march=core2" "-mlzcnt" "-march=x86-64-v2" "-march=btver2" "-march=bdver1" "-march=haswell" "-march=skylake-avx512" "-march=cannonlake" "-march=icelake-server"
        "-DAMX_SFT_MOE_NO_TIMER")
  string(REPLACE " " ";" flags_list "${flags}")
  preprocess(code name error -std=c++20 ${flags_list})
  if(NOT code EQUAL 0 OR NOT name MATCHES "^v[0-9]+_[0-9]+_")
    message(FATAL_ERROR "${flags}: no namespace: ${name} ${error}")
  endif()
  if(name IN_LIST seen)
    message(FATAL_ERROR "${flags}: the namespace is another unit's: ${name}")
  endif()
  list(APPEND seen "${name}")
endforeach()

foreach(case "-std=c++17|-std=c\\+\\+20" "-std=c++20 -fno-exceptions|no -fno-exceptions" "-std=c++20 -fno-rtti|no -fno-rtti")
  string(REPLACE "|" ";" case "${case}")
  list(GET case 0 flags)
  list(GET case 1 expected)
  string(REPLACE " " ";" flags "${flags}")
  preprocess(code name error ${flags})
  if(code EQUAL 0 OR NOT error MATCHES "${expected}")
    message(FATAL_ERROR "${flags}: expected a refusal that says ${expected}, got ${error}")
  endif()
endforeach()
