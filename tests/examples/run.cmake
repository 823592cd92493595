# run(variable arguments...): runs PROGRAM, which must succeed, and puts what it printed into `variable`.
macro(run variable)
  execute_process(COMMAND ${PROGRAM} ${ARGN} OUTPUT_VARIABLE ${variable} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${PROGRAM} ${ARGN}: status ${result}\n${${variable}}")
  endif()
endmacro()

# must_fail(regex arguments...): runs PROGRAM, which must end with status 2 and say why.
macro(must_fail regex)
  execute_process(COMMAND ${PROGRAM} ${ARGN} ERROR_VARIABLE refusal OUTPUT_VARIABLE ignored RESULT_VARIABLE result)
  if(NOT result EQUAL 2 OR NOT refusal MATCHES "${regex}")
    message(FATAL_ERROR "${PROGRAM} ${ARGN}: expected status 2 and '${regex}', got ${result} and\n${refusal}")
  endif()
endmacro()
