# Target amx_sft_moe::onednn: amx_sft_moe::amx_sft_moe and oneDNN, for kernels/onednn.hpp. Part of the project's
# own build and of the installed CMake package.
#
#   AMX_SFT_MOE_ONEDNN       AUTO: where oneDNN is found; ON: an error where it is not; OFF: never
#   AMX_SFT_MOE_ONEDNN_ROOT  a prefix with include/ and lib/; else the system's
#
# Header and library are looked for by name: Debian's package files (libdnnl-dev) want OpenCL's development
# files.
set(AMX_SFT_MOE_ONEDNN AUTO CACHE STRING "Kernel onednn: AUTO, ON or OFF")
set(AMX_SFT_MOE_ONEDNN_ROOT "" CACHE PATH "Prefix of oneDNN, where it is not the system's")
set_property(CACHE AMX_SFT_MOE_ONEDNN PROPERTY STRINGS AUTO ON OFF)

# What was found must fit (arch/onednn/matmul.hpp): version 2.6 or later, and a CPU runtime of OpenMP or none.
# A function, for its variables would otherwise be those of whoever calls find_package.
function(_amx_sft_moe_onednn_fits include result)
  set(found "")
  foreach(header dnnl_version.h dnnl_config.h oneapi/dnnl/dnnl_version.h oneapi/dnnl/dnnl_config.h)
    if(EXISTS "${include}/${header}")
      file(STRINGS "${include}/${header}" lines REGEX "define DNNL_(VERSION_M|CPU_THREADING_RUNTIME)")
      string(APPEND found "${lines};")
    endif()
  endforeach()
  string(REGEX MATCH "DNNL_VERSION_MAJOR +([0-9]+)" _ "${found}")
  set(version "${CMAKE_MATCH_1}")
  string(REGEX MATCH "DNNL_VERSION_MINOR +([0-9]+)" _ "${found}")
  set(version "${version}.${CMAKE_MATCH_1}")
  if(version VERSION_GREATER_EQUAL 2.6 AND found MATCHES "CPU_THREADING_RUNTIME +DNNL_RUNTIME_(OMP|SEQ)")
    set(${result} TRUE PARENT_SCOPE)
  else()
    message(STATUS "oneDNN in ${include} (${version}) does not fit kernel onednn: expected 2.6 or later with the CPU "
                   "runtime OMP or SEQ")
  endif()
endfunction()

if(NOT TARGET amx_sft_moe::onednn AND NOT AMX_SFT_MOE_ONEDNN STREQUAL "OFF")
  find_path(AMX_SFT_MOE_ONEDNN_INCLUDE dnnl.hpp HINTS "${AMX_SFT_MOE_ONEDNN_ROOT}/include")
  find_library(AMX_SFT_MOE_ONEDNN_LIBRARY dnnl HINTS "${AMX_SFT_MOE_ONEDNN_ROOT}/lib")
  mark_as_advanced(AMX_SFT_MOE_ONEDNN_INCLUDE AMX_SFT_MOE_ONEDNN_LIBRARY)
  set(AMX_SFT_MOE_ONEDNN_FITS FALSE)
  if(AMX_SFT_MOE_ONEDNN_INCLUDE AND AMX_SFT_MOE_ONEDNN_LIBRARY)
    _amx_sft_moe_onednn_fits("${AMX_SFT_MOE_ONEDNN_INCLUDE}" AMX_SFT_MOE_ONEDNN_FITS)
  endif()
  if(AMX_SFT_MOE_ONEDNN_FITS)
    add_library(amx_sft_moe_onednn INTERFACE IMPORTED GLOBAL)
    target_include_directories(amx_sft_moe_onednn SYSTEM INTERFACE "${AMX_SFT_MOE_ONEDNN_INCLUDE}")
    target_link_libraries(amx_sft_moe_onednn INTERFACE amx_sft_moe::amx_sft_moe "${AMX_SFT_MOE_ONEDNN_LIBRARY}")
    add_library(amx_sft_moe::onednn ALIAS amx_sft_moe_onednn)
  elseif(AMX_SFT_MOE_ONEDNN STREQUAL "ON")
    message(FATAL_ERROR
      "AMX_SFT_MOE_ONEDNN=ON: expected dnnl.hpp and libdnnl that fit (Debian: libdnnl-dev; or AMX_SFT_MOE_ONEDNN_ROOT), "
      "got ${AMX_SFT_MOE_ONEDNN_INCLUDE} and ${AMX_SFT_MOE_ONEDNN_LIBRARY}")
  endif()
endif()
