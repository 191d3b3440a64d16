using System;
using System.Collections.Generic;
using System.Linq;

namespace Example.Mail
{
    public enum Priority { Low, Normal, High }

    /// <summary>Mail (unread first).</summary>
    public class Inbox
    {
        private readonly List<Message> messages = new List<Message>();

        public int Unread
        {
            get { return messages.Count(m => !m.Read); }
        }

        public string Owner { get; set; } = "nobody";

        public void Add(Message message)
        {
            if (message == null)
            {
                throw new ArgumentNullException(nameof(message));
            }

            messages.Add(message);
        }

        [Obsolete("use Find")]
        public IEnumerable<Message> Search(string text, Priority least = Priority.Low)
        {
            return messages
                .Where(m => m.Subject.Contains(text) && m.Priority >= least)
                .OrderByDescending(m => m.Priority)
                .ToList();
        }

        public bool TryMark(int index, bool read)
        {
            try
            {
                messages[index].Read = read;
                return true;
            }
            catch (ArgumentOutOfRangeException)
            {
                Console.WriteLine("no message {0} :(", index);
                return false;
            }
        }
    }

    public class Message
    {
        public string Subject;
        public bool Read;
        public Priority Priority;
    }
}
