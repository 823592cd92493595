# The library in programs that get it more than once, that ask for components, or whose CMakeLists.txt is for an older CMake.
# Nothing is compiled. cmake -DSOURCE=... -DWORK=... -DCOMPILER=... -DGENERATOR=... -DMAKE_PROGRAM=... -P packages.cmake
cmake_minimum_required(VERSION 3.24)
file(REMOVE_RECURSE ${WORK})
set(configure ${CMAKE_COMMAND} -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${COMPILER})
execute_process(COMMAND ${configure} -S ${SOURCE} -B ${WORK}/library -DAMX_SFT_MOE_TESTS=OFF -DAMX_SFT_MOE_BENCHMARKS=OFF
                        -DAMX_SFT_MOE_EXAMPLES=OFF OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${WORK}/library --prefix ${WORK}/prefix
                OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)

# expect(regex version commands): what configuring a project with these commands, for that CMake, says at its end.
function(expect regex version commands)
  string(MD5 name "${commands}")
  file(WRITE ${WORK}/${name}/CMakeLists.txt "cmake_minimum_required(VERSION ${version})
project(consumer LANGUAGES CXX)
${commands}
set(has \"\")
foreach(target IN ITEMS amx_sft_moe onednn)
  if(TARGET amx_sft_moe::\${target})
    string(APPEND has \" \${target}\")
  endif()
endforeach()
message(STATUS \"has:\${has}.\")
")
  execute_process(COMMAND ${configure} -S ${WORK}/${name} -B ${WORK}/${name}/build -DCMAKE_PREFIX_PATH=${WORK}/prefix
                  OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}") # messages are wrapped
  if(NOT output MATCHES "${regex}")
    message(FATAL_ERROR "${commands}: expected '${regex}', got\n${output}")
  endif()
endfunction()

set(find "find_package(amx_sft_moe 0.1 REQUIRED)")
expect("has: amx_sft_moe\\." 3.16 "set(AMX_SFT_MOE_ONEDNN OFF)\n${find}")
expect("has: amx_sft_moe( onednn)?\\." 3.24 "${find}\n${find}")
expect("has: amx_sft_moe( onednn)?\\." 3.24 "add_subdirectory(\"${SOURCE}\" one)\nadd_subdirectory(\"${SOURCE}\" two)\n${find}")
expect("has: amx_sft_moe( onednn)?\\." 3.24 "${find}\nadd_subdirectory(\"${SOURCE}\" one)")
expect("CMake Error.*no component but onednn.* got nonsense" 3.24
       "find_package(amx_sft_moe 0.1 REQUIRED COMPONENTS nonsense)")
expect("has: amx_sft_moe( onednn)?\\." 3.24 "find_package(amx_sft_moe 0.1 REQUIRED OPTIONAL_COMPONENTS nonsense)")
expect("CMake Error.*no component but onednn.* got onednn" 3.24
       "set(AMX_SFT_MOE_ONEDNN OFF)\nfind_package(amx_sft_moe 0.1 REQUIRED COMPONENTS onednn)")
file(REMOVE_RECURSE ${WORK})
