# What configuring does about tests whose needs are not there. cmake -DSOURCE=... -DWORK=... -DCOMPILER=...
# -DGENERATOR=... -DMAKE_PROGRAM=... -P require_all.cmake
cmake_minimum_required(VERSION 3.24)
file(REMOVE_RECURSE ${WORK})
# Nothing but names.
file(WRITE ${WORK}/onednn/include/dnnl.hpp "")
file(WRITE ${WORK}/onednn/include/dnnl_version.h "#define DNNL_VERSION_MAJOR 2\n#define DNNL_VERSION_MINOR 6\n")
file(WRITE ${WORK}/onednn/include/dnnl_config.h "#define DNNL_CPU_THREADING_RUNTIME DNNL_RUNTIME_OMP\n")
file(WRITE ${WORK}/onednn/lib/libdnnl.so "")
file(WRITE ${WORK}/nvtx/nvtx3/nvtx3.hpp "")
set(onednn -DAMX_SFT_MOE_ONEDNN=AUTO -DAMX_SFT_MOE_ONEDNN_ROOT=${WORK}/onednn)
set(no_onednn -DAMX_SFT_MOE_ONEDNN=OFF)
set(nvtx -DAMX_SFT_MOE_NVTX_INCLUDE=${WORK}/nvtx)
set(no_nvtx -DAMX_SFT_MOE_NVTX_INCLUDE=)

# expect(regex require_all options...): what configuring says.
function(expect regex require_all)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env AMX_SFT_MOE_REQUIRE_ALL=${require_all} ${CMAKE_COMMAND} -G ${GENERATOR}
            -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${COMPILER} -DAMX_SFT_MOE_BENCHMARKS=OFF
            -DAMX_SFT_MOE_EXAMPLES=OFF -S ${SOURCE} -B ${WORK}/build ${ARGN}
    OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}") # messages are wrapped
  if(NOT output MATCHES "${regex}")
    message(FATAL_ERROR "REQUIRE_ALL=${require_all} ${ARGN}: expected '${regex}', got\n${output}")
  endif()
endfunction()

expect("Warning.*oneDNN not found.*Warning.*NVTX headers not found.*Generating done" "" ${no_onednn} ${no_nvtx})
expect("Error.*AMX_SFT_MOE_REQUIRE_ALL: oneDNN not found.*libdnnl-dev.*Configuring incomplete" 1 ${no_onednn} ${nvtx})
expect("Error.*AMX_SFT_MOE_REQUIRE_ALL: NVTX headers not found.*nvidia-nvtx.*Configuring incomplete" 1 ${onednn} ${no_nvtx})
expect("Generating done" 1 ${onednn} ${nvtx})
file(REMOVE_RECURSE ${WORK})
