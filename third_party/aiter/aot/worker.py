# SPDX-License-Identifier: Apache-2.0
"""A persistent worker of Bazel: requests on stdin, each in its own process.

The protocol is length-delimited protocol buffers, WorkRequest and WorkResponse
of Bazel's src/main/protobuf/worker_protocol.proto, of which a few fields are
read and written here by hand. One request at a time.
"""

import importlib
import io
import os
import sys
import tempfile
import traceback

# Wire types of protocol buffers: a number, or bytes after their length.
_NUMBER, _BYTES = 0, 2
# Fields of WorkRequest, and of WorkResponse.
_ARGUMENTS, _REQUEST_ID = 1, 3
_EXIT_CODE, _OUTPUT, _RESPONSE_ID = 1, 2, 3


def _read_number(stream):
  """The next number; None at the end of the stream."""
  value = shift = 0
  while byte := stream.read(1):
    value |= (byte[0] & 0x7F) << shift
    if byte[0] < 0x80:
      return value
    shift += 7
  return None


def _number(value):
  encoded = bytearray()
  while value > 0x7F:
    encoded.append(value & 0x7F | 0x80)
    value >>= 7
  encoded.append(value)
  return bytes(encoded)


def _read_fields(message):
  """(field, number or bytes) of each field of a message."""
  stream = io.BytesIO(message)
  while (tag := _read_number(stream)) is not None:
    value = _read_number(stream)
    if tag & 7 == _BYTES:
      value = stream.read(value)
    elif tag & 7 != _NUMBER:
      raise ValueError(f"field {tag >> 3} of a request has wire type {tag & 7}")
    yield tag >> 3, value


def read_request(stream):
  """The next WorkRequest as (arguments, its number); None at the end."""
  length = _read_number(stream)
  if length is None:
    return None
  arguments, number = [], 0
  for field, value in _read_fields(stream.read(length)):
    if field == _ARGUMENTS:
      arguments.append(value.decode())
    elif field == _REQUEST_ID:
      number = value
  return arguments, number


def response(exit_code, output, number):
  """A WorkResponse as it goes to Bazel."""
  text = output.encode()
  message = b"".join([
      _number(_EXIT_CODE << 3 | _NUMBER), _number(exit_code),
      _number(_OUTPUT << 3 | _BYTES), _number(len(text)), text,
      _number(_RESPONSE_ID << 3 | _NUMBER), _number(number)])
  return _number(len(message)) + message


def _run(work, arguments, log):
  """Does a request in a child. It does not return."""
  code = 1
  try:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    # What was imported before stays; what is imported now is the request's.
    importlib.invalidate_caches()
    work(arguments)
    code = 0
  except BaseException:  # pylint: disable=broad-exception-caught
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def serve(work):
  """Answers requests until Bazel closes stdin.

  Args:
    work: called with a request's arguments, in a process forked for it. An
      exception fails the request; what it prints is the request's output.
  """
  while (request := read_request(sys.stdin.buffer)) is not None:
    arguments, number = request
    with tempfile.TemporaryFile() as log:
      child = os.fork()
      if child == 0:
        _run(work, arguments, log)
      _, status = os.waitpid(child, 0)
      code = os.waitstatus_to_exitcode(status)
      log.seek(0)
      output = log.read().decode(errors="replace")
    # A signal's number is negative.
    sys.stdout.buffer.write(response(abs(code), output, number))
    sys.stdout.buffer.flush()
