# Uses the library as a package's user does and runs the result: cmake -DKIND=... -DSOURCE=... -DWORK=...
# -DCOMPILER=... -DGENERATOR=... -DMAKE_PROGRAM=... [-DWITH_ONEDNN=ON] -P run.cmake. No network, and nothing is left
# behind.
cmake_minimum_required(VERSION 3.24)
set(here ${CMAKE_CURRENT_LIST_DIR})
unset(ENV{CXXFLAGS}) # -m flags of the one who runs the tests are not the library's

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}: ${result}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(run_program)
  run(${ARGN})
  set(expected "portable fp32: bits" "auto bf16: ")
  if(WITH_ONEDNN)
    list(APPEND expected "onednn fp32: bits")
  endif()
  foreach(line IN LISTS expected)
    if(NOT output MATCHES "${line}")
      message(FATAL_ERROR "expected a line for each kernel, got\n${output}")
    endif()
  endforeach()
  message(STATUS "${KIND}\n${output}")
endfunction()

# Every header of the sources is installed, and nothing but those.
function(check_installed_headers folder)
  file(GLOB_RECURSE wanted RELATIVE ${SOURCE}/include ${SOURCE}/include/*)
  file(GLOB_RECURSE got RELATIVE ${folder} ${folder}/*)
  if(NOT wanted STREQUAL got)
    message(FATAL_ERROR "installed headers differ from the sources':\n${wanted}\n${got}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(configure ${CMAKE_COMMAND} -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${COMPILER})
set(from ${SOURCE})
if(KIND STREQUAL "fetch_content") # as GitHub makes them, less what users do not need
  file(COPY ${SOURCE}/CMakeLists.txt ${SOURCE}/LICENSE ${SOURCE}/cmake ${SOURCE}/include
       DESTINATION ${WORK}/amx-sft-moe)
  run(${CMAKE_COMMAND} -E chdir ${WORK} ${CMAKE_COMMAND} -E tar czf sources.tar.gz amx-sft-moe)
  set(from file://${WORK}/sources.tar.gz)
elseif(KIND STREQUAL "find_package")
  run(${configure} -S ${SOURCE} -B ${WORK}/library -DAMX_SFT_MOE_TESTS=OFF -DAMX_SFT_MOE_BENCHMARKS=OFF
      -DAMX_SFT_MOE_EXAMPLES=OFF -DCMAKE_INSTALL_INCLUDEDIR=headers) # not CMake's default
  run(${CMAKE_COMMAND} --install ${WORK}/library --prefix ${WORK}/prefix)
  check_installed_headers(${WORK}/prefix/headers)
elseif(KIND STREQUAL "plain") # no CMake: one command, with OpenMP and without
  set(options -std=c++20 -I ${SOURCE}/include -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Werror)
  run(${COMPILER} ${options} -fopenmp ${here}/main.cpp -o ${WORK}/consumer)
  run_program(${WORK}/consumer)
  set(with_openmp "${output}")
  run(${COMPILER} ${options} ${here}/main.cpp -o ${WORK}/consumer)
  run_program(${WORK}/consumer)
  if(NOT with_openmp STREQUAL output)
    message(FATAL_ERROR "without OpenMP other results than with it:\n${with_openmp}\n${output}")
  endif()
  file(REMOVE_RECURSE ${WORK})
  return()
endif()

run(${configure} -S ${here}/${KIND} -B ${WORK}/build -DAMX_SFT_MOE_FROM=${from} -DCMAKE_PREFIX_PATH=${WORK}/prefix
    -DWITH_ONEDNN=${WITH_ONEDNN})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run_program(${WORK}/build/consumer)
file(REMOVE_RECURSE ${WORK})
