# What AMX_SFT_MOE_ONEDNN and AMX_SFT_MOE_ONEDNN_ROOT do, with prefixes that hold nothing but names. cmake -DSOURCE=...
# -DWORK=... -DCOMPILER=... -DGENERATOR=... -DMAKE_PROGRAM=... -P onednn_options.cmake
cmake_minimum_required(VERSION 3.24)
file(REMOVE_RECURSE ${WORK})
foreach(prefix IN ITEMS one two old)
  set(minor 6)
  if(prefix STREQUAL "old")
    set(minor 5)
  endif()
  file(WRITE ${WORK}/${prefix}/include/dnnl.hpp "")
  file(WRITE ${WORK}/${prefix}/include/dnnl_version.h "#define DNNL_VERSION_MAJOR 2\n#define DNNL_VERSION_MINOR ${minor}\n")
  file(WRITE ${WORK}/${prefix}/include/dnnl_config.h "#define DNNL_CPU_THREADING_RUNTIME DNNL_RUNTIME_OMP\n")
  file(WRITE ${WORK}/${prefix}/lib/libdnnl.so "")
endforeach()
file(WRITE ${WORK}/source/CMakeLists.txt "cmake_minimum_required(VERSION 3.24)
project(options LANGUAGES CXX)
add_library(amx_sft_moe::amx_sft_moe INTERFACE IMPORTED)
include(\"${SOURCE}/cmake/amx_sft_moe-onednn.cmake\")
set(place none)
if(TARGET amx_sft_moe::onednn)
  get_target_property(place amx_sft_moe_onednn INTERFACE_LINK_LIBRARIES)
endif()
message(STATUS \"found: \${place}.\")
")

# expect(regex build options...): what configuring in that build folder says.
function(expect regex build)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${COMPILER}
            -S ${WORK}/source -B ${WORK}/${build} ${ARGN} OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}") # messages are wrapped
  if(NOT output MATCHES "${regex}")
    message(FATAL_ERROR "${build} ${ARGN}: expected '${regex}', got\n${output}")
  endif()
endfunction()

set(root -DAMX_SFT_MOE_ONEDNN_ROOT)
expect("found: .*/one/lib/libdnnl.so\\." a ${root}=${WORK}/one)
expect("found: .*/two/lib/libdnnl.so\\." a ${root}=${WORK}/two) # the same folder once more
foreach(no IN ITEMS OFF NO FALSE 0)
  expect("found: none\\." a -DAMX_SFT_MOE_ONEDNN=${no})
endforeach()
foreach(yes IN ITEMS ON YES 1 AUTO)
  expect("found: .*/two/lib/libdnnl.so\\." a -DAMX_SFT_MOE_ONEDNN=${yes})
  expect("CMake Error.*AMX_SFT_MOE_ONEDNN=${yes}.*got AMX_SFT_MOE_ONEDNN_INCLUDE-NOTFOUND" b -DAMX_SFT_MOE_ONEDNN=${yes}
         ${root}=${WORK}/nowhere) # not the system's
  expect("does not fit.*CMake Error" c -DAMX_SFT_MOE_ONEDNN=${yes} ${root}=${WORK}/old)
endforeach()
expect("found: .*/one/lib/libdnnl.so\\." b ${root}=${WORK}/one) # mended
file(REMOVE_RECURSE ${WORK})
